"""Build a configuration's module on the meta device, and count its weights, buffers and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.cli.estimate.report import EstimateInput
from trainer.config.check import ClassSpec, instantiate
from trainer.config.loading import Configuration
from trainer.errors import ConfigError, unknown_name_error
from trainer.loop.run import Run, Session
from trainer.model.blocks import find_blocks
from trainer.model.memory import ADAMW, ModelSize, OptimizerStates, Weight
from trainer.module import TrainModule
from trainer.optimizers import optimizer_like, parse_optimizers
from trainer.precision import Precision, resolve_precision
from trainer.trainer import Trainer

SIZES = {
    "layers": ("layers", "n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth"),
    "hidden": ("hidden_size", "n_embd", "d_model", "width", "dim", "hidden", "embed_dim", "hidden_dim"),
    "sequence": ("context", "block_size", "sequence_length", "seq_len", "max_seq_len", "max_position_embeddings"),
    "vocabulary": ("vocabulary", "vocab_size", "vocabulary_size", "n_vocab"),
}
"""Usual names of the sizes of a transformer."""
NOT_PROBED = ("LBFGS", "SparseAdam")
"""Optimizers that need a closure or sparse gradients."""


def examine(configuration: Configuration, states: OptimizerStates | None) -> EstimateInput:
    """Build the configuration's module and its optimizers on the meta device, and count.

    Args:
        states: the optimizer's states, if the command line gives them.

    Raises:
        ConfigError: the module cannot be built, or has no parameters.
    """
    notes: list[str] = []
    precision = resolve_precision(configuration.trainer.get("precision", "32-true"))
    module = build_without_memory(configuration.module, precision, notes)
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ConfigError(
            "the module has lazy layers, whose size is known after the first batch only: give the layers their sizes, "
            "or the number of parameters, trainer estimate --params N."
        )
    optimizers = [] if states is not None else _optimizers(module, notes)
    optimized = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    weights = [
        Weight(p.numel(), p.shape[0] if p.dim() else 1, p.requires_grad, not optimizers or id(p) in optimized)
        for p in module.parameters()
    ]
    if not weights:
        raise ConfigError(
            f"{type(module).__name__} has no parameters after configure_model. Layers that are made later, in setup, "
            "cannot be counted here: give their number, trainer estimate --params N."
        )
    blocks = [sum(p.numel() for p in block.parameters()) for block in find_blocks(module).values()]
    outside_blocks = sum(weight.elements for weight in weights) - sum(blocks)
    states = states or _states(optimizers, notes)
    size = ModelSize(
        weights, states, _buffers(module, precision), block=max(blocks, default=0), outside_blocks=outside_blocks
    )
    tied = len(list(module.named_parameters(remove_duplicate=False))) - len(weights)
    return EstimateInput(type(module).__name__, size, tied, _shape(module, configuration), notes)


def build_without_memory(recipe: ClassSpec, precision: Precision, notes: list[str]) -> TrainModule:
    """Build the module on the meta device or, where that fails, in memory, with the reason in `notes`."""
    try:
        with torch.device("meta"):
            module: TrainModule = instantiate(recipe)
            _configure(module, precision)
    # Code that reads a value fails on the meta device: `.item()` on a row of dropout rates, for example.
    except Exception as error:
        module = instantiate(recipe)
        _configure(module, precision)
        notes.append(f"the module was built in memory, because it cannot be without: {error}")
    return module


def _configure(module: TrainModule, precision: Precision) -> None:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    # Schedules may depend on the number of steps, which a trainer knows in a run.
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1000, **quiet)
    trainer.adopt(Run(trainer.config, Session(trainer.settings), "fit", module))
    with precision.init_context(module):
        module.configure_model()


def _optimizers(module: TrainModule, notes: list[str]) -> list[Optimizer]:
    try:
        automatic, calls_step = module.automatic_optimization, not module.overrides("lr_scheduler_step")
        return parse_optimizers(module.configure_optimizers(), type(module).__name__, automatic, calls_step)[0]
    # The user's method may raise anything outside of a run.
    except Exception as error:
        notes.append(
            f"configure_optimizers cannot be asked here ({type(error).__name__}: {error}); AdamW is assumed. "
            "Name another with --optimizer."
        )
        return []


def _states(optimizers: list[Optimizer], notes: list[str]) -> OptimizerStates:
    """Measure the states of the optimizers by a step on a small parameter."""
    kinds = [probe(optimizer) for optimizer in optimizers] or [ADAMW]
    largest = max(kinds, key=lambda kind: kind.per_element)
    if any(kind.per_element != largest.per_element for kind in kinds):
        notes.append(f"the optimizers differ; all are counted as {largest.name}, which keeps most")
    return largest


def named_states(name: str) -> OptimizerStates:
    """Return the states of a class of torch.optim with its default options.

    Raises:
        ConfigError: torch.optim has no such class.
    """
    classes = (kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer))
    kinds = {kind.__name__.lower(): kind for kind in classes if kind.__name__ not in ("Optimizer", *NOT_PROBED)}
    if name.lower() not in kinds:
        raise unknown_name_error("optimizer", name, kinds)
    kind: Any = kinds[name.lower()]
    return probe(kind([nn.Parameter(torch.zeros(16, 16))], lr=0.1))


def probe(optimizer: Optimizer) -> OptimizerStates:
    """Measure the state for each element and each tensor, by a step on a small parameter."""
    parameter = nn.Parameter(torch.zeros(16, 16))
    try:
        optimizer = optimizer_like(optimizer, [parameter])
    except Exception:  # the class takes other arguments: the parameter is added, and the others have no gradients
        optimizer.add_param_group({"params": [parameter]})
        for group in optimizer.param_groups:
            for other in group["params"]:
                other.grad = None
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    full = sum(value.nbytes for value in kept if value.numel() == parameter.numel())
    small = sum(value.nbytes for value in kept if value.numel() == 1)
    return OptimizerStates(type(optimizer).__name__, full / parameter.nbytes, small)


def _buffers(module: nn.Module, precision: Precision) -> int:
    """Return the bytes of the buffers, in the dtypes in which the precision stores them."""
    dtype_of = precision.stored_dtypes(module)
    return sum(buffer.numel() * dtype_of(buffer).itemsize for buffer in module.buffers())


def _shape(module: TrainModule, configuration: Configuration) -> dict[str, Any]:
    """Return the sizes that hyperparameters, the module's attributes, or those of its submodules name."""
    configs = [vars(part).get("config") for part in module.modules()]
    sources: list[Mapping[str, Any]] = [configuration.module.arguments, module.hparams]
    sources += [config if isinstance(config, Mapping) else getattr(config, "__dict__", {}) for config in configs]
    sources += [vars(part) for part in module.modules()]
    shape: dict[str, Any] = {}
    for size, names in SIZES.items():
        values = (source.get(name) for source in sources for name in names)
        value = next((value for value in values if type(value) is int and value > 0), None)
        if value is not None:
            shape[size] = value
    embeddings = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    if embeddings:
        shape.setdefault("vocabulary", max(embeddings))
    shape["dropout"] = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
    batch = configuration.data.arguments.get("batch_size") if configuration.data is not None else None
    return shape | ({"batch": batch} if isinstance(batch, int) else {})
