"""Read the setting `compile=`, and compile the parts of a module in place with torch.compile."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.errors import shortened, shown
from trainer.model.activation_checkpointing import compile_block
from trainer.model.blocks import BlockPolicy, find_blocks, has_forward, is_compiled

log = logging.getLogger("trainer")

CompileSetting = bool | str | Mapping[str, Any] | None
"""The values of `Trainer(compile=...)`."""

GRAPH_BREAKING_METHODS = ("log", "log_dict", "print")
"""Methods of a module that break the graph when a compiled `forward` calls them."""


@dataclass(frozen=True)
class Compilation:
    """Options of torch.compile, and the choice of blocks.

    The step methods are not compiled, but the `forward` that they call: that of the module, and of each submodule whose
    `forward` is not torch's own (see `compile_in_place`). The other code of a step (logging, printing, reading
    `self.global_step`, torchmetrics, breakpoints) stays ordinary Python, without graph breaks and recompilations.
    Measured against compiling `training_step` (inductor, one CPU thread): a 4-layer transformer 8.0 and 8.0 ms a step,
    a tiny MLP 0.40 and 0.37 ms (with the loss in the graph). But a `training_step` that read `self.global_step` was
    recompiled in every step, up to torch's limit of 8, and then ran uncompiled. To have the loss in the graph, compute
    the loss in a `forward`.
    """

    options: dict[str, Any]
    """Arguments of torch.compile."""
    blocks: BlockPolicy | None = None
    """The blocks to compile one by one (see `trainer.model.blocks`); blocks of one class share one compilation. None:
    compile the full module."""

    @property
    def reuses_memory(self) -> bool:
        """Whether each step overwrites the results of the last step, as CUDA graphs do."""
        asked = self.options.get("options") or {}
        return self.options.get("mode") in ("reduce-overhead", "max-autotune") or bool(asked.get("triton.cudagraphs"))

    def describe(self) -> str:
        """Return a human-readable summary."""
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return ("block by block" if self.blocks is not None else "full model") + (f" ({given})" if given else "")


def read_compile(setting: CompileSetting) -> Compilation | None:
    """Parse the setting `compile=`, in which `compile_problems` has found none; return None for no compilation."""
    if setting is None or setting is False:
        return None
    words: dict[bool | str, Mapping[str, Any]] = {True: {}, "blocks": {"blocks": True}}
    options = dict(setting if isinstance(setting, Mapping) else words.get(setting, {"mode": setting}))
    blocks = options.pop("blocks", False)
    return Compilation(options, "auto" if blocks is True else blocks or None)


def compile_problems(setting: Any) -> list[str]:
    """Return torch's objection to the setting, in a list; nothing is compiled."""
    try:
        compilation = read_compile(setting)
        if compilation is not None:
            with warnings.catch_warnings(action="ignore"):  # of what inductor imports
                torch.compile(_nothing, **compilation.options)
    except (TypeError, RuntimeError) as error:
        return [
            f"compile={shown(setting)}: {shortened(str(error), 300)}: give True, 'blocks', a mode, or a dict of "
            "torch.compile's arguments and 'blocks'."
        ]
    return []


def _nothing() -> None: ...


def start_compiling(module: nn.Module, compilation: Compilation, steps_done: Callable[[], int]) -> Callable[[], None]:
    """Compile the module, and return a function that undoes it.

    Args:
        steps_done: returns the steps of training so far.
    """
    compiled, before = compile_in_place(module, compilation), steps_done()
    leaves_graphs = compilation.reuses_memory or any(part is module for part in compiled)
    undo_methods = keep_outside_of_graphs(module, compilation.reuses_memory) if leaves_graphs else None

    def undo() -> None:
        for part in compiled:
            vars(part).pop("_compiled_call_impl", None)  # where part.compile() keeps it; torch has no undo
        if undo_methods is not None:
            undo_methods()
        # Where layers are split over processes, the first step runs uncompiled, to be checked.
        if compiled and steps_done() > before + 1 and compilations() == 0:
            log.warning(
                "compile= had no effect: the steps of %s called no compiled forward. Call modules as in self.net(x); "
                "other methods, such as self.net.encode(x), are not compiled.",
                type(module).__name__,
            )

    return undo


def compile_in_place(module: nn.Module, compilation: Compilation) -> list[nn.Module]:
    """Make the parts of `module` compile at their first call, and return these parts.

    Names, weights and parts that the user has compiled stay unchanged. A module whose `forward` is torch's own
    (nn.Sequential, nn.Linear, nn.TransformerEncoder) is compiled only within the `forward` of a compiled module, since
    Dynamo skips torch's files.

    Raises:
        ConfigError: no submodule fits the choice of blocks, or one graph cannot hold what is to be recomputed.
    """
    parts = parts_to_compile(module, compilation)
    compiled = [one for part in parts.values() for one in compile_block(part, compilation.options)]
    kind = type(module).__name__
    if parts:
        log.info("compile, %s: %s", compilation.describe(), ", ".join(name or kind for name in parts))
    else:
        log.warning(
            "compile= finds nothing to compile in %s: torch.compile skips TorchScript, the forward of torch's modules, "
            "and training_step. Define forward in the module or a submodule.",
            kind,
        )
    return compiled


NamedModules = dict[str, nn.Module]
"""Modules by name."""


def parts_to_compile(module: nn.Module, compilation: Compilation) -> NamedModules:
    """Return the outermost modules to compile; `""`: `module` itself."""
    if compilation.blocks is not None:
        return _outermost(find_blocks(module, compilation.blocks))
    chosen = {"": module} if has_forward(module) else {}
    return _outermost({**chosen, **dict(module.named_children())})


def _outermost(modules: NamedModules) -> NamedModules:
    """Return the outermost modules in `modules` that can be compiled."""
    parts: NamedModules = {}
    for name, module in modules.items():
        if _is_metric(module) or is_compiled(module):
            continue
        if has_forward(module) and is_compilable(module):
            parts[name] = module
        else:
            parts |= _outermost({f"{name}.{child}".lstrip("."): one for child, one in module.named_children()})
    return parts


def is_compilable(module: nn.Module) -> bool:
    """Whether `module.compile()` has an effect: Dynamo skips torch's own files and TorchScript."""
    return not str(module.forward.__module__).startswith("torch.") and not isinstance(module, torch.jit.ScriptModule)


def _is_metric(module: nn.Module) -> bool:
    """Whether `module` is a torchmetrics.Metric, which counts in Python and would be recompiled at each update."""
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)


def keep_outside_of_graphs(module: nn.Module, copy_values: bool) -> Callable[[], None]:
    """Break the graph where a compiled `forward` calls `self.log` and the like; return a function that undoes this.

    `copy_values`: copy logged tensors, whose memory is reused before the log is read.
    """
    own = [name for name in GRAPH_BREAKING_METHODS if name not in vars(module) and hasattr(module, name)]
    for name in own:
        method = getattr(module, name)
        vars(module)[name] = torch.compiler.disable(_copying(method) if copy_values else method)

    def undo() -> None:
        for name in own:
            vars(module).pop(name, None)

    return undo


def _copying(method: Callable[..., None]) -> Callable[..., None]:
    def with_copies(*args: Any, **kwargs: Any) -> None:
        method(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})

    return with_copies


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {name: _copied(entry) for name, entry in value.items()} if isinstance(value, Mapping) else value


def compilations() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
