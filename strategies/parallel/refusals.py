"""Find what cannot be split over processes in modules and configs alone, before the first step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from trainer.errors import ConfigError, problems_found, raise_problems
from trainer.model.blocks import class_of
from trainer.module import TrainModule
from trainer.optimizers import needs_closure
from trainer.precision import Precision
from trainer.strategies.fsdp.mesh import ModelSplit
from trainer.strategies.optimizer_trials import mixes_parameters
from trainer.strategy import StepOptions


def layout_problems(
    layout: ModelSplit,
    shards: int,
    num_processes: int,
    precision: Precision,
    module: TrainModule | None,
    own_loop: bool,
) -> list[str]:
    """Return why a model cannot be split so.

    Args:
        shards: the number of processes with different samples over which weights are sharded.
        own_loop: the user's program has the loop, as with an Engine.
    """
    plan = getattr(module, "tensor_parallel_plan", None)
    styles = [style for style in plan.values() if isinstance(style, str)] if isinstance(plan, Mapping) else []
    splits_sequences = any("sequence" in style for style in styles)
    own_backward = module is not None and (not module.automatic_optimization or module.overrides("backward"))
    return problems_found(
        (
            num_processes % layout.processes,
            f"{layout} needs a multiple of {layout.processes} processes, but devices x num_nodes asks for "
            f"{num_processes}.",
        ),
        (
            shards * layout.context % layout.expert,
            f"expert_parallel={layout.expert} does not divide the {shards * layout.context} processes over which "
            "weights are sharded: choose a number that does.",
        ),
        (
            layout.tensor * layout.pipeline > 1 and precision.name == "16-mixed",
            "precision='16-mixed' with tensor_parallel or pipeline_parallel: the loss scale cannot be agreed on over "
            "their processes. Use 'bf16-mixed'.",
        ),
        (
            layout.tensor > 1 and precision.float8 == "mx",
            f"precision={precision.name!r} with tensor_parallel: torchao cannot scale blocks of weights that are "
            "split. Use 'fp8' or 'fp8-rowwise', or context_parallel or pipeline_parallel.",
        ),
        (
            layout.tensor > 1 and layout.context > 1 and splits_sequences,
            f"context_parallel={layout.context} with a style of tensor_parallel_plan that splits sequences, too, in "
            "another order: use 'colwise' and 'rowwise' in the plan, and none for norms.",
        ),
        (
            layout.pipeline > 1 and (own_loop or own_backward),
            "pipeline_parallel runs the backward of each micro-batch itself, on several stages. Use a Trainer with "
            "automatic_optimization, without an override of backward, or use tensor_parallel or context_parallel.",
        ),
    )


def refuse_settings(layout: ModelSplit, optimizers: list[Optimizer], config: StepOptions) -> None:
    """Raise ConfigError for settings of a training that do not allow this split of a model."""
    if layout and config.compiles_module:
        raise ConfigError(
            "compile=True with a model that is split over processes: compile its blocks, which hooks of the strategy "
            'separate: Trainer(compile={"blocks": "auto"}).'
        )
    for optimizer in optimizers:
        if layout.pipeline > 1 and mixes_parameters(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} with pipeline_parallel: its step depends on all parameters, and a process "
                "has the parameters of one stage. Use an optimizer that steps each parameter alone, such as "
                "torch.optim.AdamW."
            )
        if layout and needs_closure(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} with {layout}: it evaluates the loss several times a step, and reads all "
                "weights as one vector. Use it on one process, or use another optimizer."
            )


def without_graph(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate what a backward calls, to raise ConfigError with `create_graph=True`.

    The collectives of a model that is split over processes leave no graph, so that second gradients would be wrong.
    """

    @wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "create_graph=True through layers or sequences that are split over processes (tensor_parallel, "
                "context_parallel, expert_parallel), whose gradients have no graph: second gradients, as of a gradient "
                "penalty, would be wrong. Use 'ddp', or 'fsdp' without these options."
            )
        return backward(*args)

    return checked


def refuse_repeated_blocks(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for blocks in several places of their list: a pipeline runs each block once."""
    places: dict[nn.Module, list[str]] = {block: [] for block in blocks.values()}
    parents = {name.rpartition(".")[0] for name in blocks}
    for name, child in module.named_modules(remove_duplicate=False):
        if child in places and name.rpartition(".")[0] in parents:
            places[child].append(name)
    problems = [
        f"pipeline_parallel: {' and '.join(names[:2])} are one block, and a pipeline runs each block once for a batch. "
        "Give each place a separate block, or use another strategy."
        for names in places.values()
        if len(names) > 1
    ]
    raise_problems(problems, type(module).__name__)


def refuse_mixing_layers(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for layers that mix the tokens of sequences other than by torch's attention function."""
    found: dict[str, str] = {}
    for name, block in blocks.items():
        for path, layer in block.named_modules():
            if class_of(layer) is nn.MultiheadAttention or isinstance(layer, (nn.RNNBase, _NormBase)):
                found.setdefault(class_of(layer).__name__, f"{name}.{path}".strip("."))
    problems = [
        f"context_parallel: {place} is of class {kind}, which mixes tokens in another way than "
        "torch.nn.functional.scaled_dot_product_attention. Use only that in blocks, so that each process can have some "
        "of the tokens."
        for kind, place in found.items()
    ]
    raise_problems(problems, type(module).__name__)


_COLLECTED = {
    "output_router_logits": "whose loss then has a part that is computed from the routers of all blocks",
    "output_hidden_states": "which then returns what goes into all blocks",
    "output_attentions": "which then returns the attention of all blocks",
}
"""Settings that have Hugging Face models collect something from their blocks -> the fault where these are split."""


def hugging_face_models(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and modules of Hugging Face models, the outer ones first."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    return [(name, child) for name, child in module.named_modules() if isinstance(child, kind)]


def refuse_collecting(option: str, module: nn.Module) -> None:
    """Have the Hugging Face models in a module refuse to collect something from all their blocks, and to generate."""
    for name, child in hugging_face_models(module):
        child.register_forward_pre_hook(partial(_check_call, option, name), with_kwargs=True)
        if hasattr(child, "generate"):
            child.generate = partial(_refuse_generate, option, name)


def _check_call(option: str, name: str, model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    config = model.config.get_text_config()
    for setting, fault in _COLLECTED.items():
        if kwargs.get(setting, getattr(config, setting, False)):
            raise ConfigError(
                f"{option}: {setting}=True in a call or the config of {name}, {fault} for all tokens, and a process "
                "has some of them. Set it to False, or use tensor_parallel or expert_parallel."
            )


def _refuse_generate(option: str, name: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        f"{option}: {name}.generate() needs the keys and values of all blocks and tokens, and a process has some of "
        "them. Generate from a checkpoint on one device or with tensor_parallel (trainer checkpoint export writes a "
        "folder for from_pretrained)."
    )
