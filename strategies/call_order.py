"""Have all processes exchange shards and gradients in the same order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError
from trainer.model.reachable import tensors_in

BACKWARD = "backward"
_MOST_ORDERS = 8


class CallOrder:
    """The order of the calls that exchange parts of weights or gradients, which has to be the same on all processes.

    Such an exchange does not name its weight. If one process comes to another block than the others, all compute with
    parts of different weights, without an error if these have equal sizes. So a call that is not at its place in the
    previous pass waits until all processes make it. A call at its place costs a comparison.

    Args:
        processes: of the run.
        strategy: its name.
        what: a word for messages, which stands before the name of a call: "block", "gradient of".
        first: the order that is expected in the first forward, and reversed in the first backward; None: the order of
            the first pass, which is compared when it has ended.
    """

    def __init__(self, processes: SingleProcess, strategy: str, what: str, first: list[str] | None = None) -> None:
        self._processes, self._strategy, self._what, self._first = processes, strategy, what, first
        self._agreed: dict[str, list[list[str]]] = {}
        """By pass, the last orders that all processes had, the newest first."""
        self._pass = ""
        self._expected: list[str] | None = None
        self._calls: list[str] = []
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Compare the calls within the block, a pass, with the calls of the previous pass of this name."""
        agreed = self._agreed.setdefault(name, [])
        self._pass, self._calls, self._expected = name, [], self._first
        if agreed:
            self._expected = agreed[0]
        elif self._first is not None and name == BACKWARD:
            self._expected = self._first[::-1]
        try:
            yield
            self._end()
            if not agreed or agreed[0] != self._calls:
                agreed[:] = [self._calls, *(one for one in agreed if one != self._calls)][:_MOST_ORDERS]
        finally:
            self._pass = ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compare nothing within the block."""
        before, self._pass = self._pass, ""
        try:
            yield
        finally:
            self._pass = before

    def call(self, name: str) -> None:
        """Wait for the other processes if this call comes in another order than before.

        Raises:
            ConfigError: they make another call.
        """
        # In a compiled forward nothing is compared: this would be compiled with it.
        if torch.compiler.is_compiling() or not self._pass:
            return
        at, expected = len(self._calls), self._expected
        if expected is not None and (at >= len(expected) or expected[at] != name):
            self._agree(f"{self._what} {name} {f'after {self._calls[-1]}' if self._calls else 'at first'}")
            self._expected = self._order_with(name, expected)
        self._calls.append(name)

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Have each of the modules be a call, before hooks that are there already, also when its backward begins."""
        for name, module in modules.items():
            self._hooks.append(module.register_forward_pre_hook(partial(self._forward, name), prepend=True))
            self._hooks.append(module.register_forward_hook(partial(self._follow_back, name), prepend=True))

    def watch_gradients(self, parameters: Mapping[str, nn.Parameter], notice: Callable[[str], None]) -> None:
        """Call `notice` with the name of each parameter whose gradient is there."""
        for name, parameter in parameters.items():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, name=name: notice(name)))

    def end(self) -> None:
        """Watch nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _forward(self, name: str, *_: Any) -> None:
        """Call, but for a forward that a backward repeats, as activation checkpointing does."""
        if not torch.compiler.is_compiling() and self._pass != BACKWARD:
            self.call(name)

    def _follow_back(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Have the gradient of an output be a call."""
        if torch.compiler.is_compiling() or self._pass in ("", BACKWARD) or not torch.is_grad_enabled():
            return
        tensor = next((one for one in tensors_in(output) if one.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(lambda gradient: self.call(name))

    def _order_with(self, name: str, expected: list[str]) -> list[str]:
        """Return the order that is expected after a call that comes in another one: an earlier one, or the nearest."""
        calls, at = [*self._calls, name], len(self._calls)
        for order in self._agreed[self._pass]:
            if order[: at + 1] == calls:
                return order
        if name in expected[at:]:  # what was left out does not come later
            return [*expected[:at], *expected[expected.index(name, at) :]]
        if at == len(expected) and name in expected:  # once more, as when a text is generated
            return [*expected, *expected[at - 1 - expected[::-1].index(name) :]]
        return [*expected[:at], name, *expected[at:]]

    def _end(self) -> None:
        calls = self._calls
        if self._expected is None and calls:
            digest = hashlib.sha256("\n".join(calls).encode()).hexdigest()[:8]
            self._agree(f"{self._what} {', '.join(calls[:8])} ({len(calls)} in all: {digest})")
        elif len(calls) < len(self._expected or ()):
            self._agree(f"{self._what} {calls[-1]} as the last one" if calls else "nothing of the module")

    def _agree(self, call: str) -> None:
        try:
            self._processes.wait_for_all(f"{call} in {self._pass}")
        except ConfigError as error:
            raise ConfigError(
                f"under strategy {self._strategy!r} all processes have to come to the parts of the module in one "
                f"order, but they come in different ones: {error} Leave out the same layers on all processes, or "
                "multiply what a layer adds by 0 instead."
            ) from None
