"""Compilation: what `compile=` asks for, and torch.compile for the parts of a module, in place."""

from __future__ import annotations

import inspect
import logging
import os
import re
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from trainer.errors import did_you_mean, raise_problems
from trainer.model.blocks import BlockPolicy, find_blocks

log = logging.getLogger("trainer")

CompileSetting = bool | str | Mapping[str, Any] | None
"""What `Trainer(compile=...)` takes."""

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
BUILTIN_BACKENDS = ("inductor", "eager", "aot_eager")
"""Those that every torch has."""
NOT_OPTIONS = ("model", "disable", "name")
"""Arguments of torch.compile that are the trainer's to give."""
GRAPH_BREAKING_METHODS = ("log", "log_dict", "print")
"""Methods of a module that compiled code leaves the graph for, when a compiled `forward` calls them."""


@dataclass(frozen=True)
class Compilation:
    """How to compile.

    Compiled is what the steps call, not the steps: the module's `forward`, and each of its submodules. What a step does
    around them (logging, printing, reading `self.global_step`, torchmetrics, breakpoints) stays ordinary Python, and
    costs no break in a graph and no recompilation. Measured against compiling `training_step` itself (inductor, one CPU
    thread): a 4-layer transformer 8.0 and 8.0 ms a step, a tiny MLP 0.40 and 0.37 ms (its loss was in the graph). But a
    step that read `self.global_step` was compiled again in every step, up to torch's limit of 8, and then not at all.
    To have the loss in the graph, compute it in a `forward`.
    """

    options: dict[str, Any]
    """Arguments of torch.compile."""
    blocks: BlockPolicy | None = None
    """Compile only these, one by one (see `trainer.model.blocks`): blocks of one class share one compilation. None: the
    whole."""

    @property
    def reuses_memory(self) -> bool:
        """Whether CUDA graphs write each step's results where the last one's were."""
        asked = self.options.get("options") or {}
        return self.options.get("mode") in ("reduce-overhead", "max-autotune") or bool(asked.get("triton.cudagraphs"))

    def describe(self) -> str:
        """In words, for the plan."""
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return ("block by block" if self.blocks is not None else "whole") + (f" ({given})" if given else "")


def read_compile(setting: CompileSetting) -> Compilation | None:
    """What the setting means; None: do not compile.

    Raises:
        ConfigError: listing everything that is wrong with it.
    """
    raise_problems(compile_problems(setting), "compile=")
    if setting is None or setting is False:
        return None
    if setting is True:
        return Compilation({})
    if isinstance(setting, str):
        return Compilation({}, "auto") if setting == "blocks" else Compilation({"mode": setting})
    options = dict(setting)
    blocks = options.pop("blocks", None)
    if blocks is False:
        blocks = None
    return Compilation(options, "auto" if blocks is True else blocks)


def compile_problems(setting: Any) -> list[str]:
    """Everything wrong with the setting itself, one sentence each."""
    if setting is None or isinstance(setting, bool):
        return []
    if isinstance(setting, str):
        return [] if setting == "blocks" else _wrong_mode(setting, f"compile={setting!r}", ("blocks", *MODES))
    if not isinstance(setting, Mapping):
        return [
            f"compile={setting!r}: give True, 'blocks', a mode ({', '.join(MODES)}), or a dict of torch.compile's "
            "arguments, such as {'mode': 'max-autotune', 'blocks': True}."
        ]
    known = ("blocks", *(name for name in inspect.signature(torch.compile).parameters if name not in NOT_OPTIONS))
    problems = [
        f"compile has no option {name!r}.{did_you_mean(str(name), known)} Known: {', '.join(known)}."
        for name in setting
        if name not in known
    ]
    if setting.get("mode") is not None:
        problems += _wrong_mode(setting["mode"], f"compile mode={setting['mode']!r}", MODES)
        if setting.get("options") is not None:
            problems.append("compile: torch takes either mode or options, not both: leave one out.")
    if not isinstance(setting.get("options"), (Mapping, type(None))):
        problems.append(f"compile options={setting['options']!r}: give a dict, such as {{'max_autotune': True}}.")
    problems += [
        f"compile {name}={setting[name]!r}: give {' or '.join(map(str, allowed))}."
        for name, allowed in (("dynamic", (True, False, None)), ("fullgraph", (True, False)))
        if name in setting and setting[name] not in allowed
    ]
    return problems + _wrong_backend(setting.get("backend"))


def _wrong_mode(mode: Any, given: str, known: tuple[str, ...]) -> list[str]:
    if mode in MODES:
        return []
    from torch._inductor import list_mode_options

    known = tuple(dict.fromkeys([*known, *list_mode_options()]))  # those of the torch that is installed
    if mode in known:
        return []
    return [f"{given}: there is no such mode.{did_you_mean(str(mode), known)} Known: {', '.join(known)}."]


def _wrong_backend(backend: Any) -> list[str]:
    if backend is None or callable(backend) or backend in BUILTIN_BACKENDS:
        return []
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if backend in known:
        return []
    return [f"compile backend={backend!r} is unknown.{did_you_mean(str(backend), known)} Known: {', '.join(known)}."]


def check_toolchain(compilation: Compilation, device_type: str) -> list[str]:
    """What torch.compile's default backend needs on this machine and does not find, one sentence each."""
    if device_type == "xla":
        return ["compile= has no effect on torch_xla's devices, which compile every step anyway: leave it out."]
    if compilation.options.get("backend", "inductor") != "inductor":
        return []
    instead = "or try compile={'backend': 'aot_eager'}, which needs no compiler and is not faster"
    if device_type == "cuda" and find_spec("triton") is None:
        return [f"compile= needs the package 'triton' on CUDA. Install it, {instead}."]
    if device_type != "cpu":
        return []
    problems = []
    compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if shutil.which(compiler.split()[0]) is None:
        where = {
            "win32": "Install Visual Studio's C++ build tools and start from its developer prompt",
            "darwin": "Install it with 'xcode-select --install'",
        }.get(sys.platform, "Install it ('apt-get install g++'), or name another one in the environment variable CXX")
        problems.append(f"compile= needs a C++ compiler on the CPU, and {compiler!r} is not found. {where}; {instead}.")
    if sys.platform == "linux" and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        problems.append(
            "compile= needs Python's header files on the CPU, and there is no "
            f"{sysconfig.get_path('include')}/Python.h. Install them ('apt-get install python3-dev'); {instead}."
        )
    return problems


def start_compiling(
    module: nn.Module,
    compilation: Compilation,
    steps_done: Callable[[], int] | None = None,
) -> Callable[[], None]:
    """Compile the module, and watch for recompilations. Return a function that undoes it.

    Args:
        steps_done: gives the steps of training so far; None: the run does not train.
    """
    changed = compile_in_place(module, compilation)
    leaves_graphs = compilation.reuses_memory or any(part is module for part in changed)
    undo_methods = keep_outside_of_graphs(module, compilation.reuses_memory) if leaves_graphs else None
    watch = RecompilationMonitor()
    before = steps_done() if steps_done is not None else 0

    def undo() -> None:
        watch.close()
        for part in changed:
            vars(part).pop("_compiled_call_impl", None)
        if undo_methods is not None:
            undo_methods()
        if changed and steps_done is not None and steps_done() > before and watch.compilations == 0:
            log.warning(
                "compile= had no effect: the steps of %s called none of what it compiles, which is forward, as in "
                "self.net(x). Other methods, such as self.net.encode(x), are not compiled.",
                type(module).__name__,
            )

    return undo


def parts_to_compile(module: nn.Module, compilation: Compilation) -> dict[str, nn.Module]:
    """The modules to compile by name (`""`: `module` itself).

    Raises:
        ConfigError: no submodule fits the choice of blocks.
    """
    if compilation.blocks is not None:
        return {name: block for name, block in find_blocks(module, compilation.blocks).items() if not _is_metric(block)}
    whole = {"": module} if has_forward(module) else {}
    return {**whole, **dict(_outermost(module, ""))}


def _outermost(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that can be called: where one cannot (nn.ModuleList), those within it."""
    for name, child in module.named_children():
        if _is_metric(child):
            continue
        if has_forward(child):
            yield f"{prefix}{name}", child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def has_forward(module: nn.Module) -> bool:
    """Whether it can be called."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_metric(module: nn.Module) -> bool:
    """A torchmetrics.Metric counts in Python: it would be compiled again at every update."""
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)


def compile_in_place(module: nn.Module, compilation: Compilation) -> list[nn.Module]:
    """Have the parts of `module` compiled when they are first called. Names and weights stay as they are.

    A part that the user has compiled already is left alone.

    Returns:
        What was changed.
    """
    parts = parts_to_compile(module, compilation)
    changed: list[nn.Module] = []
    codes: dict[type, CodeType] = {}
    for name, part in parts.items():
        if part._compiled_call_impl is not None or hasattr(part, "_orig_mod"):
            continue
        if str(part.forward.__module__).startswith("torch."):
            # Dynamo passes over frames of torch's own files, so that compile() on an nn.Sequential does nothing.
            entry = _entry(name, part, codes if compilation.blocks is not None else {})
            part._compiled_call_impl = torch.compile(entry, **compilation.options)
        else:
            part.compile(**compilation.options)
        changed.append(part)
    if changed:
        names = ", ".join(name or type(module).__name__ for name in parts)
        log.info("compile, %s: %s", compilation.describe(), names)
    else:
        log.warning(
            "compile= finds nothing to compile in %s: it has neither a forward nor submodules with one. What "
            "training_step does itself is not compiled: move it into a forward.",
            type(module).__name__,
        )
    return changed


def _entry(name: str, part: nn.Module, codes: dict[type, CodeType]) -> Callable[..., Any]:
    """A function that calls `part`, in code that torch.compile looks into.

    torch keeps a limited number of compilations for one piece of code: each part gets a copy of its own, except for
    those of a class in `codes`, which share their compilations.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)

    code = codes.setdefault(type(part), call.__code__.replace(co_name=name or "forward"))
    return FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)


def keep_outside_of_graphs(module: nn.Module, copy_values: bool) -> Callable[[], None]:
    """Let a compiled `forward` call `self.log`: a graph ends there. Returns the undo.

    `copy_values`: the memory of a tensor is used again before the log is read.
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


log = logging.getLogger("trainer")

RECOMPILE_WARNING_THRESHOLD = 3
"""As many compilations for one cause are not normal: sizes that vary cost one, evaluation mode another."""

ADVICE = (
    (
        r"Guard failed on a parameter|_parameters\[",
        "Several modules of one class share compiled code, but their weights differ in shape: compile what holds them "
        "as a whole (compile=True), or give compile={'blocks': ...} the classes whose members are alike.",
    ),
    (
        r"size mismatch|stride mismatch|rank mismatch|\.size\(\)|shape",
        "Inputs change their shape: set compile={'dynamic': True}, pad them to a few lengths, or drop_last=True.",
    ),
    (
        r"dtype mismatch|dispatch key set mismatch|requires_grad mismatch",
        "Inputs change their dtype, device or need of a gradient from call to call: make them alike.",
    ),
    (
        r" == |___check_obj_id|___check_type_id|dict|len\(",
        "A Python value that changes is read in compiled code: hand it over as a tensor, keep it in a buffer, or read "
        "it in the step, outside of forward.",
    ),
)
"""What to do, by what torch says of the cause."""


class RecompilationMonitor:
    """Looks at torch's record of compilations whenever one is over; it costs nothing in between.

    torch closes the record of a compilation only after it tells that it is over, so a warning may come with the next
    one, or at the end.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import get_compilation_metrics

        self._handler = callback_handler
        self._read: Callable[[], list[Any]] = get_compilation_metrics
        self._seen = {id(record): record for record in self._read()}
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self.compilations = len(self._seen)
        """How many there have been in this process, as far as torch remembers."""
        callback_handler.register_end_callback(self._look)

    def close(self) -> None:
        """A last look."""
        self._look()
        self._handler.remove_end_callback(self._look)

    def _look(self, *event: Any) -> None:
        records = self._read()
        new = [record for record in records if id(record) not in self._seen]
        self._seen = {id(record): record for record in records}  # held, so that an id means one record
        self.compilations += len(new)
        for record in new:
            if record.recompile_reason:
                self._count(record)

    def _count(self, record: Any) -> None:
        reason = re.sub(r"^\d+/\d+: ", "", str(record.recompile_reason).strip())
        # The numbers differ from time to time, the cause does not.
        cause = (record.co_filename, record.co_firstlineno, record.co_name, re.sub(r"-?\d+(\.\d+)?", "#", reason))
        self._counts[cause] += 1
        if self._counts[cause] == RECOMPILE_WARNING_THRESHOLD:
            log.warning("%s", _in_words(record, reason))


def _in_words(record: Any, reason: str) -> str:
    from torch._dynamo import config

    advice = next((words for pattern, words in ADVICE if re.search(pattern, reason)), "")
    where = f"{record.co_name} ({Path(record.co_filename or '?').name}:{record.co_firstlineno})"
    return (
        f"compile: {where} has been compiled again {RECOMPILE_WARNING_THRESHOLD} times for the same cause, "
        f"{' '.join(reason.split())}. {advice} After {config.recompile_limit} compilations torch gives up "
        "and runs it uncompiled. TORCH_LOGS=recompiles in the environment shows each one."
    )
