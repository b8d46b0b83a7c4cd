"""Find the blocks of a module: the submodules that are sharded, gathered or recomputed one at a time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from trainer.arguments import PositiveInt
from trainer.errors import ConfigError, first_of

BlockPolicy = str | type | PositiveInt | Collection[str | type] | Callable[[str, nn.Module], bool]
"""The choice of blocks: `"auto"`, class names or classes, a least number of parameters, or a function of a
submodule's name and the submodule."""

LISTS = (nn.ModuleList, nn.Sequential)
MIN_BLOCK_FRACTION = 20
"""Least fraction (1 / 20) of the parameters in a block, in a module without repetition."""


def find_blocks(module: nn.Module, policy: BlockPolicy = "auto") -> dict[str, nn.Module]:
    """Return the blocks of `module` by name: children before their parents, siblings in the order of registration.

    Blocks exclude `module` itself and containers without a `forward`, such as `nn.ModuleList`, and the parametrizations
    of a layer, whose values it uses after them. A submodule with several names has the first one. By policy:

    - `"auto"`: the `_no_split_modules` of Hugging Face models, and elsewhere the members of one class of the outermost
      `nn.ModuleList`s and `nn.Sequential`s (an encoder and a decoder, say; members with children before plain layers),
      and three or more attributes of one class. Classes with less than a tenth of the largest class's parameters are
      left out. If these blocks hold less than half of the parameters, the large submodules of the rest are blocks too.
      Blocks do not overlap, and submodules that share a parameter with the rest of the module are left out. May be
      empty.
    - class names (`"Block"`, `"package.Block"`) or classes (subclasses count), one or a collection: all submodules of
      these classes. Each class has to match something.
    - an int: submodules with at least this many parameters outside of the blocks within them.
    - a callable: the submodules for which `policy(name, submodule)` is true.

    Raises:
        ConfigError: the policy matches nothing.
    """
    if policy == "auto":
        return _auto(module)
    if isinstance(policy, (str, type)):
        policy = [policy]
    if isinstance(policy, Collection):
        found = _by_class(module, policy)
    elif isinstance(policy, int):
        found = dict(_large(module, policy))
    else:
        found = {name: child for name, child in _submodules(module) if policy(name, child)}
    if not found:
        raise ConfigError(f"no submodule of {type(module).__name__} fits {policy!r}. {_list_classes(module)}")
    return found


def exclude_tied_weights(module: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks that share no parameter with the rest of the module, so that each can be sharded alone."""
    owners = _number_of_owners(module)
    return {name: block for name, block in blocks.items() if not _tied(block, owners)}


def outermost(module: nn.Module, fits: Callable[[nn.Module], bool]) -> dict[str, Any]:
    """Return the outermost modules in `module`, which may be one, that fit, by the prefix of their tensors' names."""
    found: dict[str, Any] = {}
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        if fits(child) and not prefix.startswith(tuple(found)):
            found[prefix] = child
    return found


def main_stack(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks of the one list that has several of them; all blocks if there is no such list, or several."""
    lists: dict[str, dict[str, nn.Module]] = {}
    for name, block in blocks.items():
        lists.setdefault(name.rpartition(".")[0], {})[name] = block
    several = [found for found in lists.values() if len(found) > 1]
    return several[0] if len(several) == 1 else blocks


def without_caches(arguments: Any) -> Any:
    """Return a tuple or dict of a block's arguments with None for Hugging Face's caches of keys and values.

    A block adds its keys to the cache, so that a second forward, on the same or other tokens, would attend to both.
    """
    cache = getattr(sys.modules.get("transformers"), "Cache", ())

    def kept(value: Any) -> Any:
        return None if isinstance(value, cache) else value

    if isinstance(arguments, dict):
        return {name: kept(value) for name, value in arguments.items()}
    return tuple(map(kept, arguments))


def describe_blocks(blocks: dict[str, nn.Module]) -> str:
    """Return text such as `"12 x Block (net.blocks.0 to net.blocks.11), Embedding (net.embedding)"`, or `"nothing"`."""
    names: dict[str, list[str]] = {}
    for name, block in blocks.items():
        names.setdefault(class_of(block).__name__, []).append(name)
    groups = (
        f"{len(own)} x {kind} ({own[0]} to {own[-1]})" if len(own) > 1 else f"{kind} ({own[0]})"
        for kind, own in names.items()
    )
    return ", ".join(groups) or "nothing"


def _submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all submodules that can be a block, children first, each once."""
    seen = {id(module)}

    def below(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            if id(child) in seen or isinstance(child, ParametrizationList):
                continue
            seen.add(id(child))
            if not isinstance(child, nn.MultiheadAttention):  # it uses the weight of its layer, and never calls it
                yield from below(child, f"{prefix}{name}.")
            if has_forward(child):
                yield f"{prefix}{name}", child

    return below(module, "")


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called, unlike an nn.ModuleList."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module itself are compiled, by the Trainer or by the user."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _size(module: nn.Module) -> int:
    return sum(map(_elements, module.parameters()))


def _elements(parameter: nn.Parameter) -> int:
    """Return the full number of elements, also of a parameter that ZeRO-3 has sharded (locally empty)."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


# -- by size -----------------------------------------------------------------------------------------------------------


def _large(module: nn.Module, minimum: int, taken: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield submodules with at least `minimum` parameters outside of the modules below them and of `taken` modules."""
    covered = {id(parameter) for block in taken for parameter in block.parameters()}
    for name, child in _submodules(module):
        rest = {id(p): _elements(p) for p in child.parameters() if id(p) not in covered}
        if sum(rest.values()) >= minimum:
            covered |= rest.keys()
            yield name, child


# -- by class ----------------------------------------------------------------------------------------------------------


def _by_class(module: nn.Module, kinds: Collection[str | type]) -> dict[str, nn.Module]:
    found = {name: child for name, child in _submodules(module) if any(_is_a(child, kind) for kind in kinds)}
    unmatched = [kind for kind in kinds if not any(_is_a(child, kind) for child in found.values())]
    if unmatched:
        names = [getattr(kind, "__name__", kind) for kind in unmatched]
        known = _list_classes(module)
        raise ConfigError(f"blocks: no submodule of {type(module).__name__} with a forward is one of {names}. {known}")
    return found


def _is_a(module: nn.Module, kind: str | type) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    cls = class_of(module)
    return kind in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def class_of(module: nn.Module) -> type:
    """Return the class of a module as its author named it.

    FSDP2 gives sharded modules a subclass `FSDP<name>`, and torch gives modules with parametrizations one, too.
    """
    cls = type(module)
    if cls.__bases__[0] is getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None):
        cls = cls.__bases__[1]
    return cls.__bases__[0] if is_parametrized(module) and cls.__name__.startswith("Parametrized") else cls


def _list_classes(module: nn.Module) -> str:
    """Return the classes of the submodules, those with most parameters first."""
    counts, sizes = Counter[str](), Counter[str]()
    for _, child in _submodules(module):
        counts[class_of(child).__name__] += 1
        sizes[class_of(child).__name__] += _size(child)
    shown = first_of((f"{name} ({counts[name]})" for name, _ in sizes.most_common()), 20)
    return f"The classes of its submodules, each with its count: {shown or 'none'}."


# -- auto --------------------------------------------------------------------------------------------------------------


def _auto(module: nn.Module) -> dict[str, nn.Module]:
    owners = _number_of_owners(module)
    declared = _not_to_be_split(module)
    stacks = _stacks(module, declared)
    stacks += _stacks(module, [*declared, *chain.from_iterable(stacks)], plain=True)
    by_kind: Counter[type] = Counter()
    for stack in stacks:
        by_kind[class_of(stack[0])] += sum(map(_size, stack))
    largest = max(by_kind.values(), default=0)
    large_stacks = [stack for stack in stacks if by_kind[class_of(stack[0])] * 10 >= largest]
    chosen = [block for block in chain(declared, *large_stacks) if not _tied(block, owners)]

    total = _size(module)
    if sum(map(_size, chosen)) * 2 < total:
        own = [sum(map(_elements, child.parameters(recurse=False))) for _, child in _submodules(module)]
        minimum = max(1, min(total // MIN_BLOCK_FRACTION, max(own, default=1)))
        for _, child in _large(module, minimum, [*chosen]):
            if _is_apart(child, chosen) and not _tied(child, owners):
                chosen.append(child)
    wanted = set(map(id, chosen))
    return {name: child for name, child in _submodules(module) if id(child) in wanted}


def _not_to_be_split(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in the `_no_split_modules` of Hugging Face models."""
    models: list[Any] = [model for model in module.modules() if getattr(model, "_no_split_modules", None)]
    named = {part for model in models for part in model.modules() if class_of(part).__name__ in model._no_split_modules}
    declared: list[nn.Module] = []
    for _, child in reversed([*_submodules(module)]):
        if child in named and _size(child) and _is_apart(child, declared):
            declared.append(child)
    return declared


def _is_apart(module: nn.Module, blocks: Iterable[nn.Module]) -> bool:
    """Return whether a module is not in a block and contains no block."""
    within = {id(child) for block in blocks for child in block.modules()}
    return within.isdisjoint(map(id, module.modules()))


def _stacks(module: nn.Module, taken: list[nn.Module], plain: bool = False) -> list[list[nn.Module]]:
    """Return the outermost groups of repeated modules that do not overlap with `taken`; see `_groups`."""
    groups = [one for one in _groups(module, plain) if all(_is_apart(member, taken) for member in one)]
    inside = set(map(id, chain(taken, *groups)))
    for child in module.children():
        if id(child) not in inside and not isinstance(child, ParametrizationList):
            groups += _stacks(child, taken, plain)
    return groups


def _groups(parent: nn.Module, plain: bool) -> list[list[nn.Module]]:
    """Return the groups of a module's children of one class: two in a list, three attributes.

    Args:
        plain: groups of plain layers in a list, as in an MLP; else of modules with children. In a ModuleList one of
            these is enough, because a list is meant to repeat. Lists of blocks are not blocks.
    """
    is_list = isinstance(parent, LISTS)
    if plain and not is_list:
        return []
    if plain or isinstance(parent, nn.Sequential):
        minimum = 2
    else:
        minimum = 1 if is_list else 3
    by_kind: dict[type, list[nn.Module]] = {}
    for child in parent.children():
        if has_forward(child) and _size(child) and _is_composite(child) != plain:
            by_kind.setdefault(class_of(child), []).append(child)
    return [group for group in by_kind.values() if len(group) >= minimum and not _are_lists(group, is_list)]


def _are_lists(group: list[nn.Module], in_list: bool) -> bool:
    """Return whether the members of a group are lists; in a list, whether they are lists of blocks."""
    return isinstance(group[0], LISTS) and (not in_list or any(_groups(member, False) for member in group))


def _is_composite(module: nn.Module) -> bool:
    return bool({name for name, _ in module.named_children()} - {"parametrizations"})


def _number_of_owners(module: nn.Module) -> Counter[int]:
    """Count the submodules that hold each parameter directly; a tied weight has more than one."""
    tables = (child.named_parameters(recurse=False, remove_duplicate=False) for child in module.modules())
    return Counter(id(parameter) for table in tables for _, parameter in table)


def _tied(block: nn.Module, owners: Counter[int]) -> bool:
    """Return True if `block` shares a parameter with the rest of the module."""
    within = _number_of_owners(block)
    return any(owners[key] > number for key, number in within.items())
