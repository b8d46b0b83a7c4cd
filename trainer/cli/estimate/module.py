"""Build a module on the meta device, and count its weights, buffers and optimizer states."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.config.loading import Recipe
from trainer.config.specs import ClassSpec, instantiate
from trainer.errors import ConfigError
from trainer.loop.run import Run, Session
from trainer.model.blocks import find_blocks
from trainer.model.memory import ADAMW, ModelSize, OptimizerStates, Transformer, Weight, elements_of
from trainer.module import TrainModule
from trainer.optimizers import optimizer_like, parse_optimizers
from trainer.precision import Precision
from trainer.trainer import Trainer

NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "width", "dim", "hidden", "embed_dim", "hidden_dim"),
    "sequence": ("context", "block_size", "sequence_length", "seq_len", "max_seq_len", "max_position_embeddings"),
    "vocabulary": ("vocabulary", "vocab_size", "vocabulary_size", "n_vocab", "num_embeddings"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "kv_n_heads", "kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "experts_per_token"),
}
"""Usual names of the sizes of a transformer."""
NEEDED = ("hidden", "sequence", "batch")
"""Sizes without which activations are not counted."""


@dataclass
class EstimateInput:
    """The known facts about the module to train."""

    name: str
    size: ModelSize
    shape: dict[str, Any] = field(default_factory=dict)
    """The known arguments of `Transformer`."""
    notes: list[str] = field(default_factory=list)

    def transformer(self, checkpointing: bool) -> Transformer | None:
        """Return the sizes of the transformer, None if one is not known. The widths of MLPs follow from the weights."""
        if not self.shape.keys() >= {*NEEDED}:
            return None
        known = {"heads": 1, "experts_per_token": 1, "vocabulary": 0, **self.shape}
        known = {"kv_heads": known["heads"], "head_dim": max(1, known["hidden"] // known["heads"]), **known}
        hidden, block = known["hidden"], max([*self.size.blocks, []], key=elements_of)
        experts, gated = max((weight.experts for weight in block), default=0), 3 * hidden
        mlp = elements_of(weight for weight in block if weight.is_matrix and not weight.experts)
        mlp = max(0, mlp - 2 * hidden * known["head_dim"] * (known["heads"] + known["kv_heads"]))
        if experts:
            mixture = elements_of(weight for weight in block if weight.experts)
            known |= {"intermediate": mixture // (experts * gated), "shared": mlp // gated, "gated": True}
        else:
            known["gated"] = mlp > 2.5 * hidden * known.get("intermediate", mlp)
            known["intermediate"] = mlp // (gated if known["gated"] else 2 * hidden) or 4 * hidden
        return Transformer(**known, experts=experts, checkpointing=checkpointing)


def examine(configuration: Recipe, precision: Precision) -> EstimateInput:
    """Build the configuration's module and its optimizers on the meta device, and count.

    Raises:
        ConfigError: the module cannot be built, or has no parameters.
    """
    notes: list[str] = []
    module = build_without_memory(configuration.module, precision, notes)
    optimizers, kinds = _optimizers(module, notes)
    largest = max(kinds, key=lambda kind: kind.per_element)
    if len(kinds) > 1:
        notes.append(f"all optimizers are counted as {largest.name}, which keeps most")
    size = count(module, precision, optimizers, largest)
    shape = _shape(module, [configuration.module.arguments, module.hparams])
    batch = configuration.data.arguments.get("batch_size") if configuration.data is not None else None
    return EstimateInput(type(module).__name__, size, shape | ({"batch": batch} if type(batch) is int else {}), notes)


def examine_hugging_face(path: str, precision: Precision) -> EstimateInput:
    """Build the model of a Hugging Face config.json on the meta device, and count.

    Raises:
        ConfigError: transformers cannot build it.
    """
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(path)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model = kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
    # The code of many models may raise anything.
    except Exception as error:
        raise ConfigError(f"{path}: transformers cannot build this model ({error}): give --params instead.") from error
    shape = _shape(model, [])
    shape.pop("sequence", None)  # the longest that it can read, and not the usual one
    return EstimateInput(type(model).__name__, count(model, precision, [], ADAMW), shape)


def count(
    module: nn.Module, precision: Precision, optimizers: Sequence[Optimizer], states: OptimizerStates
) -> ModelSize:
    """Count the weights of a module, in and around its blocks.

    Raises:
        ConfigError: it has none, or none yet.
    """
    parameters = list(module.parameters())
    if not parameters or any(map(is_lazy, parameters)):
        raise ConfigError(
            f"{type(module).__name__} has lazy layers, or no parameters after configure_model, and cannot be counted. "
            "Give the layers their sizes, or trainer estimate --params N."
        )
    optimized = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    optimized = optimized or {*map(id, parameters)}
    experts = {p.shape[0] for p in parameters if p.dim() == 3}
    weights = {p: _weight(p, id(p) in optimized, experts) for p in parameters}
    blocks = [list(block.parameters()) for block in find_blocks(module).values()]
    inside = {p for block in blocks for p in block}
    dtype_of = precision.stored_dtypes(module)
    buffers = sum(buffer.numel() * dtype_of(buffer).itemsize for buffer in module.buffers())
    before, after, tied = ([weights[p] for p in part] for part in _around(module, inside))
    in_blocks = [[weights[p] for p in block] for block in blocks if block]
    return ModelSize(before, in_blocks, after, tied, states, buffers)


def _around(module: nn.Module, inside: Collection[nn.Parameter]) -> tuple[Iterable[nn.Parameter], ...]:
    """Return the parameters before the blocks, those after them, and those that are used again after them."""
    named = [p for _, p in module.named_parameters(remove_duplicate=False)]
    start = next((number for number, p in enumerate(named) if p in inside), len(named))
    before, later = dict.fromkeys(named[:start]), dict.fromkeys(p for p in named[start:] if p not in inside)
    return before, [p for p in later if p not in before], [p for p in later if p in before]


def _weight(p: nn.Parameter, optimized: bool, experts: Collection[int]) -> Weight:
    """Describe a weight; experts have three dimensions, and a router has a row for each expert."""
    rows = p.shape[0] if p.dim() else 1
    matrix = p.dim() == 2 and rows not in experts
    return Weight(p.numel(), rows, p.requires_grad, optimized, matrix, experts=rows if p.dim() == 3 else 0)


def build_without_memory(recipe: ClassSpec, precision: Precision, notes: list[str]) -> TrainModule:
    """Build the module on the meta device or, where that fails, in memory, with the reason in `notes`."""
    try:
        with torch.device("meta"):
            return _configured(recipe, precision)
    # Code that reads a value fails on the meta device: `.item()` on a row of dropout rates, for example.
    except Exception as error:
        module = _configured(recipe, precision)
        notes.append(f"the module was built in memory, because it cannot be without: {error}")
    return module


def _configured(recipe: ClassSpec, precision: Precision) -> TrainModule:
    module: TrainModule = instantiate(recipe)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    # Schedules may depend on the number of steps, which a trainer knows in a run.
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1000, **quiet)
    trainer.adopt(Run(trainer.config, Session(trainer.settings), "fit", module))
    with precision.init_context(module):
        module.configure_model()
    return module


def _optimizers(module: TrainModule, notes: list[str]) -> tuple[list[Optimizer], list[OptimizerStates]]:
    """Return the module's optimizers, and the states of each."""
    try:
        automatic, calls_step = module.automatic_optimization, not module.overrides("lr_scheduler_step")
        found = parse_optimizers(module.configure_optimizers(), type(module).__name__, automatic, calls_step)[0]
        return found, [probe(optimizer) for optimizer in found] or [ADAMW]
    # The user's method may raise anything outside of a run, and some optimizers need a closure.
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        notes.append(f"configure_optimizers cannot be asked here ({cause}); AdamW is assumed.")
        return [], [ADAMW]


def probe(optimizer: Optimizer) -> OptimizerStates:
    """Measure the state for each element and each tensor, by a step on a small parameter."""
    parameter = nn.Parameter(torch.zeros(16, 16))
    optimizer = optimizer_like(optimizer, [parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    full = sum(value.nbytes for value in kept if value.numel() == parameter.numel())
    small = sum(value.nbytes for value in kept if value.numel() == 1)
    return OptimizerStates(type(optimizer).__name__, full / parameter.nbytes, small)


def _shape(module: nn.Module, first: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sizes that hyperparameters, or attributes of the module and its submodules, name."""
    configs = [vars(part)["config"] for part in module.modules() if "config" in vars(part)]
    texts = [getattr(config, "text_config", config) for config in configs]  # of a model for texts and images
    named = [config if isinstance(config, Mapping) else getattr(config, "__dict__", {}) for config in texts]
    sources = [*first, *named, *map(vars, module.modules())]
    shape: dict[str, Any] = {}
    for size, names in NAMES.items():
        values = [source.get(name) for source in sources for name in names]
        numbers = [value for value in values if type(value) is int and value > 0]
        if numbers:
            shape[size] = numbers[0]
    shape["dropout"] = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
    return shape
