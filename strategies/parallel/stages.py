"""Split the blocks and the parameters of a module over the stages of a pipeline."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping

from torch import nn

from trainer.errors import ConfigError
from trainer.model.blocks import describe_blocks
from trainer.model.pipeline_stages import cut_blocks


def split_blocks(module: nn.Module, blocks: dict[str, nn.Module], stages: int) -> dict[str, int]:
    """Return the stage of each block, so that the largest number of parameters of a stage is the least possible.

    What comes before the blocks belongs to the first stage, what comes after them to the last.

    Raises:
        ConfigError: there are fewer blocks than stages, or blocks of several stacks.
    """
    names = list(blocks)
    parents = {name.rpartition(".")[0] for name in names}
    if len(names) < stages:
        raise ConfigError(
            f"pipeline_parallel={stages} needs at least {stages} repeated blocks, and {type(module).__name__} has "
            f"{len(names)}: name their class by auto_wrap_policy, or choose fewer stages."
        )
    if len(parents) > 1:
        raise ConfigError(
            f"pipeline_parallel: the blocks of {type(module).__name__} are {describe_blocks(blocks)}, in several "
            "lists, and a pipeline runs through one. Name the class of one list's members by auto_wrap_policy, or use "
            "another strategy (an encoder with a decoder cannot be a pipeline)."
        )
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks.values()]
    inside = {id(p) for block in blocks.values() for p in block.parameters()}
    for end, around in zip((0, -1), _parameters_around(module, blocks), strict=True):
        sizes[end] += sum(p.numel() for key, p in around.items() if key not in inside)
    ends = cut_blocks(sizes, stages)
    return {name: bisect(ends, number) for number, name in enumerate(names)}


def _parameters_around(
    module: nn.Module, blocks: Mapping[str, nn.Module]
) -> tuple[dict[int, nn.Parameter], dict[int, nn.Parameter]]:
    """Return, by `id`, the parameters of the modules registered before the blocks, and of those after them.

    Those that a module around the blocks has itself are in both: nothing says where they are used.
    """
    names = list(blocks)
    order = [name for name, _ in module.named_modules()]
    inside, start = tuple(f"{block}." for block in names), order.index(names[0])
    before: dict[int, nn.Parameter] = {}
    after: dict[int, nn.Parameter] = {}
    for number, name in enumerate(order):
        own = {id(p): p for p in module.get_submodule(name).parameters(recurse=False)}
        if f"{name}.".startswith(inside):
            continue
        if not name or names[0].startswith(f"{name}."):
            before, after = before | own, after | own
        elif number < start:
            before |= own
        else:
            after |= own
    return before, after


def stages_of_parameters(
    module: nn.Module, blocks: Mapping[str, nn.Module], stage_of_block: Mapping[str, int], stages: int
) -> dict[int, set[int]]:
    """Return, by the `id` of each parameter, the stages that need it; a tied weight may be needed by several."""
    needed: dict[int, set[int]] = {id(p): set() for p in module.parameters()}
    for name, block in blocks.items():
        for parameter in block.parameters():
            needed[id(parameter)].add(stage_of_block[name])
    for stage, around in zip((0, stages - 1), _parameters_around(module, blocks), strict=True):
        for key in around:
            needed[key].add(stage)
    return needed
