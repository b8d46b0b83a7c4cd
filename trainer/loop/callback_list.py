"""CallbackList: call the hooks of all callbacks and of the module, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.callback import HOOKS, Callback, Checkpoint
from trainer.errors import raise_problems
from trainer.metrics.phases import Phase, during, unheard
from trainer.runs.hook_checks import arguments_of, callback_problems, overridden_hooks, takes

if TYPE_CHECKING:
    import torch

    from trainer.module import TrainModule

_ENDING = ("teardown", "on_exception")
"""Hooks that are called for every callback even if another one's fails: they close files, threads and processes."""

NOT_ON_MODULES = ("on_sanity_check_start", "on_sanity_check_end", "on_exception", "on_checkpoint_saved")


def build_callback_list(
    callbacks: list[Callback], trainer: object, module: TrainModule, phase: Phase = unheard
) -> CallbackList:
    """Return the hooks in calling order: callbacks, the module, then callbacks with `runs_last`."""
    raise_problems([problem for callback in callbacks for problem in callback_problems(callback)], "the callbacks")
    ordered = sorted([*callbacks, ModuleCallback(module)], key=lambda callback: callback.runs_last)
    hooks = CallbackList(ordered, trainer, module, phase)
    # The loop calls these two hooks of a `Checkpoint` separately.
    others = [callback for callback in hooks.callbacks if not isinstance(callback, Checkpoint)]
    apart = CallbackList(others, trainer, module, phase)
    hooks.on_train_epoch_end, hooks.on_train_end = apart.on_train_epoch_end, apart.on_train_end
    return hooks


class CallbackList:
    """Calls the hooks of several callbacks: each hook calls, in order, the callbacks that override it.

    The calls are bound in the constructor, so that an unused hook costs one empty call. Trainer and module, the first
    arguments of every hook, are bound too: the loop calls `hooks.on_train_start()` and needs no Trainer. A hook set on
    an instance (`callback.on_fit_start = f`) counts as overridden. If profilers listen to `phase`, each call of a hook
    is a phase.

    Args:
        callbacks: the callbacks in calling order.
        trainer, module: the first arguments of every hook.
        phase: the run's phases.
    """

    setup: Callable[[str], None]
    teardown: Callable[[str], None]
    on_exception: Callable[[BaseException], None]
    on_save_checkpoint: Callable[[dict[str, Any]], None]
    on_checkpoint_saved: Callable[[str], None]
    on_load_checkpoint: Callable[[dict[str, Any]], None]
    on_fit_start: Callable[[], None]
    on_fit_end: Callable[[], None]
    on_sanity_check_start: Callable[[], None]
    on_sanity_check_end: Callable[[], None]
    on_train_start: Callable[[], None]
    on_train_end: Callable[[], None]
    on_train_epoch_start: Callable[[], None]
    on_train_epoch_end: Callable[[], None]
    on_train_step_end: Callable[[], None]
    on_train_batch_start: Callable[[Any, int], None]
    on_train_batch_end: Callable[[Any, Any, int], None]
    on_before_zero_grad: Callable[[torch.optim.Optimizer], None]
    on_before_backward: Callable[[torch.Tensor], None]
    on_after_backward: Callable[[], None]
    on_before_optimizer_step: Callable[[torch.optim.Optimizer], None]
    on_validation_start: Callable[[], None]
    on_validation_end: Callable[[], None]
    on_validation_epoch_start: Callable[[], None]
    on_validation_epoch_end: Callable[[], None]
    on_validation_batch_start: Callable[..., None]
    on_validation_batch_end: Callable[..., None]
    on_test_start: Callable[[], None]
    on_test_end: Callable[[], None]
    on_test_epoch_start: Callable[[], None]
    on_test_epoch_end: Callable[[], None]
    on_test_batch_start: Callable[..., None]
    on_test_batch_end: Callable[..., None]
    on_predict_start: Callable[[], None]
    on_predict_end: Callable[[], None]
    on_predict_epoch_start: Callable[[], None]
    on_predict_epoch_end: Callable[[], None]
    on_predict_batch_start: Callable[..., None]
    on_predict_batch_end: Callable[..., None]

    def __init__(
        self, callbacks: Iterable[Callback], trainer: object = None, module: object = None, phase: Phase = unheard
    ) -> None:
        self.callbacks = list(callbacks)
        methods: dict[str, list[Callable[..., None]]] = {hook: [] for hook in HOOKS}
        for callback in self.callbacks:
            for hook in overridden_hooks(callback):
                methods[hook].append(partial(_with_phase(callback, hook, phase), trainer, module))
        for hook, calls in methods.items():
            setattr(self, hook, _call_each(calls, hook in _ENDING) if calls else nothing)
        self.take_outputs = self.on_train_batch_end is not nothing

    def wrap_calls(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Call each hook that a callback or the module overrides through the function that `wrap` returns for it."""
        for hook in HOOKS:
            call = getattr(self, hook)
            if call is not nothing:
                setattr(self, hook, wrap(call))

    @property
    def module_answer(self) -> Any:
        """The last return value of the module's `on_train_batch_start`; with -1 a module ends the epoch."""
        return next((callback.answer for callback in self.callbacks if isinstance(callback, ModuleCallback)), None)


class ModuleCallback(Callback):
    """The module's hooks as a callback, for the list of callbacks."""

    answer: Any = None
    """The last return value of `on_train_batch_start`."""

    def __init__(self, module: TrainModule) -> None:
        if not module.overrides_any(HOOKS):
            return
        for hook in HOOKS:
            if hook not in NOT_ON_MODULES and module.overrides(hook):
                expected = arguments_of(hook)[2:]
                call = _without_trainer_and_module(index_optional(getattr(module, hook), expected))
                setattr(self, hook, self._remembering(call) if hook == "on_train_batch_start" else call)

    def _remembering(self, call: Any) -> Any:
        def remember(*args: Any) -> None:
            self.answer = call(*args)

        return remember


def _without_trainer_and_module(method: Any) -> Any:
    return lambda trainer, module, *args: method(*args)


def _with_phase(callback: Callback, hook: str, phase: Phase) -> Callable[..., None]:
    method = index_optional(getattr(callback, hook), arguments_of(hook))
    name = f"{'module' if isinstance(callback, ModuleCallback) else type(callback).__name__}.{hook}"
    return during(phase, name, method)


def index_optional(method: Callable[..., Any], expected: list[str]) -> Callable[..., Any]:
    """Return a method that gets dataloader_idx=0 if it is called without one, as for an evaluation's only loader."""
    least = len(expected) - 1
    if expected[-1:] != ["dataloader_idx=0"] or takes(method, least):
        return method
    return lambda *args: method(*args, *[0] * (least + 1 - len(args)))


def nothing(*args: Any) -> None:
    """Stand for a hook that no callback overrides."""


def _call_each(methods: Sequence[Callable[..., None]], continue_on_error: bool = False) -> Callable[..., None]:
    if len(methods) == 1:
        return methods[0]
    if continue_on_error:
        return partial(call_all, methods)

    def call(*args: Any) -> None:
        for method in methods:
            method(*args)

    return call


def call_all(methods: Sequence[Callable[..., None]], *args: Any) -> None:
    """Call every method, then raise the last error, if there was one, with the earlier ones as its context."""
    with ExitStack() as calls:
        for method in reversed(methods):
            calls.callback(method, *args)
