"""Intercept what user code does with a module's parameters outside of forward, backward and step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack

from torch import nn
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode

_HERE = (__name__, "trainer.strategies.deepspeed.empty_parameters")


class ParameterAccess(TorchFunctionMode):
    """A mode that each function of torch is called through from `begin` to `end`, except where it is `paused`."""

    def __init__(self, module: nn.Module, strategy: str) -> None:
        super().__init__()
        self._module, self._strategy = module, strategy

    def begin(self) -> None:
        """Begin to intercept."""
        self.end()
        _push_on_torch_function_stack(self)

    def end(self) -> None:
        """End; do nothing if the mode is not active."""
        others = []
        while _len_torch_function_stack() and (mode := _pop_torch_function_stack()) is not self:
            others.append(mode)
        for mode in reversed(others):
            _push_on_torch_function_stack(mode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Intercept nothing within the block, where it would slow each operation."""
        on_top = _len_torch_function_stack() and _get_function_stack_at(_len_torch_function_stack() - 1) is self
        if on_top:
            _pop_torch_function_stack()
        try:
            yield
        finally:
            if on_top:
                _push_on_torch_function_stack(self)


def copy_advice(strategy: str) -> str:
    """Return the words for a `copy.deepcopy` of a module that a strategy has sharded."""
    return (
        f"copy.deepcopy cannot copy a module that strategy {strategy!r} has sharded, also within full_parameters. Copy "
        "the values there, {name: p.detach().clone() for name, p in module.named_parameters()}; or make another such "
        "module, and have it load_state_dict(trainer.full_state_dict(everywhere=True))."
    )


def within_deepcopy() -> bool:
    """Whether the caller is called by `copy.deepcopy`."""
    frames = walk_stack(sys._getframe())
    return any(one.f_code.co_name == "deepcopy" and one.f_globals.get("__name__") == "copy" for one, _ in frames)


def from_user_code() -> bool:
    """Whether the first frame outside of torch belongs neither to DeepSpeed nor to this package."""
    for frame, _ in walk_stack(sys._getframe()):
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package not in ("torch", "contextlib") and module not in _HERE:
            return package not in ("deepspeed", "trainer")
    return False
