"""Phases: tells listeners when each part of a run begins and ends, by standing in for the calls of that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from trainer.callback import HOOKS, Callback, CallbackList, ModuleCallback

if TYPE_CHECKING:
    from trainer.trainer import Trainer

DATA = "data wait"
TRANSFER = "transfer to device"
FORWARD = "forward (training_step)"
BACKWARD = "backward"
OPTIMIZER = "optimizer step"
LOGGING = "logging"
CHECKPOINT = "checkpoint"
EVALUATION_DATA = "validation data wait"
EVALUATION = "validation_step"


class PhaseListener(Protocol):
    """Who is told. Phases lie inside one another; one that ends with an exception may not say so."""

    def begin_phase(self, name: str) -> None: ...
    def end_phase(self, name: str) -> None: ...


class Phases:
    """The phases of a run: data, transfer, forward, ..., the hooks of each callback (`"Class.hook"`) and of the module
    (`"module.hook"`).

    From the first listener to the last, methods of this run's own objects are replaced. A run that nobody listens to
    has nothing of it.
    """

    def __init__(self) -> None:
        self._listeners: tuple[PhaseListener, ...] = ()
        self._replaced: list[tuple[Any, str]] = []
        self._hooks: tuple[Trainer, CallbackList] | None = None

    def listen(self, trainer: Trainer, listener: PhaseListener) -> None:
        """From now on, which is `on_fit_start` or later: all that is replaced has to be there."""
        self._listeners = (*self._listeners, listener)
        if self._hooks is None:
            self._install(trainer)

    def unsubscribe(self, listener: PhaseListener) -> bool:
        """No more. Returns whether `listener` was one."""
        was_one = listener in self._listeners
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        if not self._listeners:
            self._remove()
        return was_one

    def begin(self, name: str) -> None:
        for listener in self._listeners:
            listener.begin_phase(name)

    def end(self, name: str) -> None:
        for listener in self._listeners:
            listener.end_phase(name)

    def _install(self, trainer: Trainer) -> None:
        strategy, metrics = trainer.strategy, trainer.metrics
        for owner, method, phase in (
            (trainer, "transfer", TRANSFER),
            (trainer, "log_to_loggers", LOGGING),
            (metrics, "read_step", LOGGING),
            (metrics, "read_epoch", LOGGING),
            (strategy, "backward", BACKWARD),
            (strategy, "step", OPTIMIZER),
        ):
            self._replace(owner, method, self._around(getattr(owner, method), phase))
        self._replace(strategy, "call", self._calls(strategy.call))
        assert trainer.train_loader is not None
        self._replace(trainer.train_loader, "iterate", self._each(trainer.train_loader.iterate, DATA))
        for feed in trainer.val_loaders.values():
            self._replace(feed, "iterate", self._each(feed.iterate, EVALUATION_DATA))
        self._replace(trainer, "begin_save", self._begins_with(trainer.begin_save, CHECKPOINT))
        self._replace(trainer, "end_save", self._ends_with(trainer.end_save, CHECKPOINT))
        self._hooks = (trainer, trainer.hooks)
        trainer.hooks = CallbackList([self._told(callback) for callback in trainer.hooks.callbacks])

    def _remove(self) -> None:
        for owner, method in self._replaced:
            vars(owner).pop(method, None)
        self._replaced.clear()
        if self._hooks is not None:
            trainer, hooks = self._hooks
            trainer.hooks, self._hooks = hooks, None

    def _replace(self, owner: Any, method: str, replacement: Callable[..., Any]) -> None:
        vars(owner)[method] = replacement
        self._replaced.append((owner, method))

    def _around(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        begin, end = self.begin, self.end

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin(phase)
            try:
                return method(*args, **kwargs)
            finally:
                end(phase)

        return call

    def _calls(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`strategy.call`, whose first argument is the name of a step method."""
        training, evaluation = self._around(method, FORWARD), self._around(method, EVALUATION)

        @wraps(method)
        def call(step: str, *args: Any) -> Any:
            return (training if step == "training_step" else evaluation)(step, *args)

        return call

    def _each(self, iterate: Callable[..., Iterator[Any]], phase: str) -> Callable[..., Iterator[Any]]:
        """Every batch that is waited for, and the iterator itself, which may have to start workers."""

        @wraps(iterate)
        def batches(*args: Any, **kwargs: Any) -> Iterator[Any]:
            iterator = self._around(iterate, phase)(*args, **kwargs)
            following = self._around(iterator.__next__, phase)
            while True:
                try:
                    batch = following()
                except StopIteration:
                    return
                yield batch

        return batches

    def _begins_with(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any) -> Any:
            self.begin(phase)
            return method(*args)

        return call

    def _ends_with(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any) -> Any:
            result = method(*args)
            self.end(phase)
            return result

        return call

    def _told(self, callback: Callback) -> Callback:
        """A callback that calls `callback`, and says so."""
        own = CallbackList([callback])
        stand_in = Callback()
        name = "module" if isinstance(callback, ModuleCallback) else type(callback).__name__
        for hook in HOOKS:
            if own.uses(hook):
                setattr(stand_in, hook, self._around(getattr(callback, hook), f"{name}.{hook}"))
        return stand_in
