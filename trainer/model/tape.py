"""A tape of tensor operations: recorded without values, run later, each tensor living only as long as it is needed."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch


@dataclass(eq=False, slots=True)
class Storage:
    """The memory of a tensor and of all its views."""

    nbytes: int
    real: torch.UntypedStorage | None = None
    """Memory that was there before the tape; it holds the values from before the tape until the tape is run."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor: a view of a cell."""

    cell: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """This view of real memory."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(storage, self.offset, self.shape, self.stride)

    def covers_its_cell(self) -> bool:
        """Whether writing all elements writes every byte."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return expected * self.dtype.itemsize == self.cell.nbytes


LARGE = 2**20
"""Bytes."""

Origin = int | torch.Tensor
"""Where a generator's state comes from: the draw with this number left it so, or it was set to this state."""


@dataclass(eq=False, slots=True)
class Operation:
    """A call of an operator, with `TensorView`s in the place of tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[TensorView | None]
    """Of the tensors that it returns: those with memory of their own."""
    reads: set[Storage]
    """Whose values it needs. It may take more tensors as arguments, of which it needs only the shape."""
    writes: set[Storage]
    overwrites: set[Storage]
    """The part of `writes` of which no former value is left."""
    default_dtype: torch.dtype
    origin: Origin | None = None
    """Of the generator, if it draws random numbers."""

    cells: set[Storage] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = {ref.cell for ref in leaves((self.args, self.kwargs), TensorView)} | self.writes


class Tape:
    """Operations in the order in which they were called. Runs any part of them on the CPU, with the values and random
    numbers that running all of them in order gives."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._states: dict[int, torch.Tensor] = {}

    def value(self, ref: TensorView) -> torch.Tensor:
        """The values of a tensor as of now; changes no memory from before the tape."""
        with _kept_generator():
            player = Replayer(self, self._needed({ref.cell}, len(self.operations)), {ref.cell}, private=True)
            player.run(player.waiting)
            return ref.of(player.memory(ref.cell)).clone()

    def generator_state(self, origin: Origin) -> torch.Tensor:
        """The state that a generator with this origin is in."""
        missing = []
        place = origin
        while not isinstance(place, torch.Tensor) and place not in self._states:
            missing.append(place)
            before = self.operations[place].origin
            assert before is not None
            place = before
        for number in reversed(missing):
            # Run for its draws only, in memory that is thrown away.
            with _kept_generator():
                player = Replayer(
                    self, [*self._needed(self.operations[number].reads, number), number], (), private=True
                )
                player.run(player.waiting)
        return origin if isinstance(origin, torch.Tensor) else self._states[origin]

    def record_rng_state(self, number: int) -> None:
        """The operation `number` has just drawn from torch's default generator."""
        self._states[number] = torch.default_generator.get_state()

    def play(self, wanted: Collection[Storage], finished: Callable[[Storage, torch.UntypedStorage], None]) -> None:
        """Run what gives the `wanted` cells their values, and everything that writes to memory from before the tape.

        Each wanted cell goes to `finished` when nothing will change or read it any more, and its memory is freed. The
        random operations run in order, and all others as soon as that completes something, so that as few cells as
        possible are alive at a time.
        """
        before = {cell for operation in self.operations for cell in operation.writes if cell.real is not None}
        needed = self._needed({*wanted, *before}, len(self.operations))
        with _kept_generator():
            player = Replayer(self, needed, wanted, private=False, finished=finished)
            draws = [number for number in needed if self.operations[number].origin is not None]
            for number in draws:
                player.run_up_to(number)
                player.run_what_is_ready(self.operations[number].cells, number)
            for cell in wanted:
                for number in player.of_cell.get(cell, ()):
                    player.run_up_to(number)
            player.run(player.waiting)
            for cell in wanted:
                if cell not in player.of_cell:
                    finished(cell, player.memory(cell))
                    player.forget(cell)

    def _needed(self, roots: Iterable[Storage], until: int) -> list[int]:
        """The operations before number `until` that the values of the cells `roots` depend on, in order."""
        live = set(roots)
        found = []
        for number in range(until - 1, -1, -1):
            operation = self.operations[number]
            if operation.writes & live:
                found.append(number)
                live -= operation.overwrites
                live |= operation.reads
        return found[::-1]


class Replayer:
    """One run of some of a tape's operations."""

    def __init__(
        self,
        tape: Tape,
        numbers: list[int],
        wanted: Collection[Storage],
        private: bool,
        finished: Callable[[Storage, torch.UntypedStorage], None] | None = None,
    ) -> None:
        self.tape = tape
        self.wanted = set(wanted)
        self.private = private
        self.finished = finished
        self.waiting = dict.fromkeys(numbers)
        """The operations that have not run, in order."""
        self.of_cell: dict[Storage, list[int]] = {}
        self._uses = Counter(cell for number in numbers for cell in tape.operations[number].cells)
        self._memory: dict[Storage, torch.UntypedStorage] = {}
        self._written = {cell for number in numbers for cell in tape.operations[number].writes}
        self._after: dict[int, set[int]] = {}
        """Which operations have to run before each."""
        self._last_draw: dict[int, int] = {}
        """The latest draw among those."""
        self._find_order(numbers)

    def _find_order(self, numbers: list[int]) -> None:
        writer: dict[Storage, int] = {}
        readers: dict[Storage, set[int]] = {}
        for number in numbers:
            operation = self.tape.operations[number]
            after = {writer[cell] for cell in operation.cells if cell in writer}
            for cell in operation.cells:
                self.of_cell.setdefault(cell, []).append(number)
                if cell in operation.writes:
                    after |= readers.pop(cell, set())
                    writer[cell] = number
                else:
                    readers.setdefault(cell, set()).add(number)
            draw = number if operation.origin is not None else -1
            self._after[number] = after
            self._last_draw[number] = max((self._last_draw[earlier] for earlier in after), default=-1)
            self._last_draw[number] = max(self._last_draw[number], draw)

    def run_up_to(self, number: int) -> None:
        """Run an operation, and before it those that have to."""
        todo, found = [number], set()
        while todo:
            current = todo.pop()
            if current in self.waiting and current not in found:
                found.add(current)
                todo += self._after[current]
        self.run(sorted(found))

    def run_what_is_ready(self, cells: Iterable[Storage], record_rng_state: int) -> None:
        """Run the next operations on `cells`, and on what they write, up to `record_rng_state`."""
        todo = list(cells)
        while todo:
            cell = todo.pop()
            for number in self.of_cell[cell]:
                if number not in self.waiting:
                    continue
                if self._last_draw[number] > record_rng_state:
                    break
                self.run_up_to(number)
                todo += self.tape.operations[number].writes - {cell}

    def run(self, numbers: Iterable[int]) -> None:
        """Run these operations in the given order, and let go of the memory that no other one needs."""
        for number in list(numbers):
            operation = self.tape.operations[number]
            self._run(operation, number)
            del self.waiting[number]
            for cell in operation.cells:
                self._uses[cell] -= 1
                if self._uses[cell] == 0 and not (self.private and cell in self.wanted):
                    if cell in self.wanted and self.finished is not None:
                        self.finished(cell, self.memory(cell))
                    self.forget(cell)

    def _run(self, operation: Operation, number: int) -> None:
        def real(ref: TensorView) -> torch.Tensor:
            return ref.of(self.memory(ref.cell))

        if operation.origin is not None:
            torch.default_generator.set_state(self.tape.generator_state(operation.origin))
        args, kwargs = replaced((operation.args, operation.kwargs), TensorView, real)
        with _default_dtype(operation.default_dtype):
            result = operation.function(*args, **kwargs)
        if operation.origin is not None:
            self.tape.record_rng_state(number)
        del args, kwargs
        for ref, tensor in zip(operation.outputs, leaves(result, torch.Tensor), strict=True):
            if ref is not None:
                self._keep(ref, tensor)

    def _keep(self, ref: TensorView, tensor: torch.Tensor) -> None:
        if (tensor.stride(), tensor.storage_offset()) == (ref.stride, ref.offset) and tensor.dtype == ref.dtype:
            self._memory[ref.cell] = tensor.untyped_storage()
        else:
            # The operator lays its result out differently without values.
            ref.of(self.memory(ref.cell)).copy_(tensor)

    def memory(self, cell: Storage) -> torch.UntypedStorage:
        """The real memory of a cell: zeros, where nothing has been written."""
        if cell not in self._memory:
            if cell.real is None:
                self._memory[cell] = torch.zeros(cell.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
            elif self.private and cell in self._written:
                self._memory[cell] = cell.real.clone()
            else:
                return cell.real
        return self._memory[cell]

    def forget(self, cell: Storage) -> None:
        """Free the memory of a cell."""
        if self._memory.pop(cell, None) is not None and cell.nbytes >= LARGE:
            trim_heap()


class GeneratorTrace:
    """Follows where the states of generators come from, though nothing is drawn.

    After every draw that is put off, the generator gets a state of its own. At the next draw it has that state, or an
    earlier one that was put back (`torch.random.fork_rng`), or one that was set (`torch.manual_seed`).
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Generator, dict[bytes, Origin]]] = {}

    def origin(self, generator: torch.Generator, draw: int | None = None) -> Origin:
        """Where its state comes from; `draw`: the number of the operation that draws from it now."""
        state = generator.get_state()
        known = self._known.setdefault(id(generator), (generator, {}))[1]
        origin = known.setdefault(state.numpy().tobytes(), state)
        if draw is not None:
            mark = b""
            while not mark or mark in known:
                torch.empty(()).uniform_(generator=generator)
                mark = generator.get_state().numpy().tobytes()
            known[mark] = draw
        return origin

    def ends(self) -> list[tuple[torch.Generator, Origin]]:
        """All generators, and where the states come from that they are to have in the end."""
        return [(generator, self.origin(generator)) for generator, _ in list(self._known.values())]


def trim_heap() -> None:
    """Return freed memory to the system. Left alone, glibc keeps every large block that a small one has been cut from,
    and the process grows with every tensor (https://man7.org/linux/man-pages/man3/malloc_trim.3.html)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


def leaves(tree: Any, kind: type) -> list[Any]:
    """The objects of a kind in nested tuples, lists and dicts."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [leaf for branch in tree for leaf in leaves(branch, kind)]
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch, kind)]
    return []


def replaced(tree: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """The same nested tuples, lists and dicts, with `function` called on each object of a kind."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([replaced(branch, kind, function) for branch in tree])
    if isinstance(tree, dict):
        return {key: replaced(branch, kind, function) for key, branch in tree.items()}
    return tree


def places(
    value: Any, put: Callable[[torch.Tensor], None], depth: int = 2
) -> Iterator[tuple[Callable[[torch.Tensor], None], torch.Tensor]]:
    """The tensors in an attribute, and in its lists and dicts, each with what puts another one in its place."""
    if isinstance(value, torch.Tensor):
        yield put, value
    elif isinstance(value, (list, dict)) and depth:
        for key, item in enumerate(value) if isinstance(value, list) else value.items():
            yield from places(item, partial(value.__setitem__, key), depth - 1)


@contextmanager
def _kept_generator() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.default_generator.set_state(state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
