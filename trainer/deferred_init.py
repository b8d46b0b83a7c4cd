"""Building a module without values first, and giving it the right initial values later, one tensor at a time."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from trainer.errors import ConfigError
from trainer.tape import Cell, GeneratorTrace, Operation, Origin, Ref, Tape, leaves, places, replaced

aten = torch.ops.aten

READING = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
"""Operators that bring values to Python."""
ALLOCATING = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operators whose result has no values yet."""
OVERWRITING = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"),
    *("log_normal_", "cauchy_", "geometric_"),
}
"""Operators that write all elements of their first argument without reading them."""

Take = Callable[[str, torch.Tensor], None]


class DeferredInit:
    """Within this context tensors are created without values, on the meta device, and what would have been done to them
    is recorded; `materialize` does it.

        recording = DeferredInit(module)
        with recording:
            module.configure_model()
        ...                       # wrap, shard and allocate
        recording.materialize(take)

    The values are bit for bit those that one process gets that builds the module on the CPU, its generators in the
    state in which they are on entry. (Of all processes' generators, Python's and NumPy's too: as only torch's
    operations are recorded, every process has to enter with the same states.) Peak memory is a few tensors, even if the
    module initializes itself anew at the end of its construction.

    Tensors that existed before are used as they are; what recorded operations do to them is done in `materialize`.
    Values that the construction looks at (`item()`, `tolist()`, `if tensor.any()`) are computed for it, from the start
    on and without keeping them. Torch's default generator is left as on entry.

    Raises, within the context:
        ConfigError: something cannot be recorded: names the operator and the line of the user's code.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tape = Tape()
        self.generators = GeneratorTrace()
        self.end: list[tuple[torch.Generator, Origin]] = []
        self._cells: dict[int, tuple[StorageWeakRef, Cell]] = {}
        self._pending: set[Cell] = set()
        """Memory from before that recorded operations write."""
        self._checksums: list[tuple[torch.UntypedStorage, int]] = []
        self._named: dict[str, Ref] = {}
        self._attributes: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []
        self._contexts = ExitStack()

    def __enter__(self) -> DeferredInit:
        self._start = torch.default_generator.get_state()
        self.generators.origin(torch.default_generator)
        self._contexts.enter_context(warnings.catch_warnings())
        # It is none: the copy is recorded.
        warnings.filterwarnings(
            "ignore", ".*copying from a non-meta parameter in the checkpoint to a meta", UserWarning
        )
        self._contexts.enter_context(_Asked(self))
        self._contexts.enter_context(_Called(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._contexts.close()
        self.end = self.generators.ends()
        torch.default_generator.set_state(self._start)
        if kind is None:
            self._find_names()

    # -- afterwards ----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The parameters and buffers whose values `materialize` gives: those made or changed in the context, by their
        names in `module.named_parameters()` and `module.named_buffers()` when it ended."""
        return list(self._named)

    def materialize(self, take: Take, only: Callable[[str], bool] | None = None, advance: bool = True) -> None:
        """Compute the initial values, and hand each to `take(name, value)`.

        `value` is the whole tensor on the CPU, freed after the call: copy what is to be kept. They come in the order in
        which they become final. A parameter that several modules share comes once, with its first name. Tensors that
        are plain attributes of modules are put there. Call it once.

        Args:
            take: is called with the names of `names` for which `only(name)` is true.
            only: leave out work for other tensors; default: all.
            advance: leave torch's CPU generator where a real construction would have; else as it is, and random numbers
                that nobody needs are not drawn.

        Raises:
            ConfigError: a NumPy array that was copied into the module has changed since.
        """
        for storage, checksum in self._checksums:
            if _checksum(storage) != checksum:
                raise ConfigError(
                    "memory that torch does not own (a NumPy array or a memory-mapped file) was copied into "
                    f"{type(self.module).__name__} in configure_model, and was changed afterwards. Give it a copy: "
                    "torch.tensor(array) instead of torch.from_numpy(array)."
                )
        receivers: dict[Cell, list[Callable[[torch.UntypedStorage], None]]] = {}
        for name, ref in self._named.items():
            if only is None or only(name):
                receivers.setdefault(ref.cell, []).append(partial(_take, take, name, ref))
        for put, tensor in self._attributes:
            ref = self._ref(tensor)
            receivers.setdefault(ref.cell, []).append(partial(_put, put, ref, tensor.requires_grad))

        def finished(cell: Cell, storage: torch.UntypedStorage) -> None:
            for receive in receivers[cell]:
                receive(storage)

        self.tape.play(receivers, finished)
        if advance:
            for generator, origin in self.end:
                generator.set_state(self.tape.generator_state(origin))

    def _find_names(self) -> None:
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if is_traceable_wrapper_subclass(tensor) and any(map(self._is_deferred, _inner(tensor))):
                raise ConfigError(
                    f"{name!r} of {type(self.module).__name__} is a {type(tensor).__name__}, which cannot be made "
                    "in configure_model of a sharded run: make it in __init__."
                )
            if not is_traceable_wrapper_subclass(tensor) and self._is_deferred(tensor):
                self._named[name] = self._ref(tensor)
        for owner in self.module.modules():
            for attribute, value in vars(owner).items():
                if attribute not in ("_parameters", "_buffers", "_modules"):
                    found = places(value, partial(setattr, owner, attribute))
                    self._attributes += [(put, t) for put, t in found if t.is_meta and self._is_known(t)]

    # -- meanwhile -----------------------------------------------------------------------------------------------------

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, or record it."""
        given = leaves((args, kwargs), torch.Tensor)
        if function is aten.lift_fresh.default:  # torch.tensor([...])
            return self._constant(args[0]) if args[0].numel() else args[0]
        draws = torch.Tag.nondeterministic_seeded in function.tags
        makes = not given and any(argument.name == "device" for argument in function._schema.arguments)
        written = _written(function, args, kwargs)
        if not (draws or makes or any(map(self._is_deferred, given)) or any(map(self._is_known, written))):
            return function(*args, **kwargs)
        if torch.Tag.inplace_view in function.tags:
            return function(*args, **kwargs)
        if function in READING:
            return function(*(self.value(a) if isinstance(a, torch.Tensor) else a for a in args))

        generator = kwargs.get("generator") or torch.default_generator
        if draws and generator.device.type != "cpu":
            raise ConfigError(
                f"configure_model draws from a generator on {generator.device}. In a sharded run initial values are "
                "drawn on the CPU: use torch.Generator() without a device."
            )
        if "generator" in kwargs:
            kwargs["generator"] = None
        name = function._schema.name.split("::")[1]
        made: list[torch.Tensor | None]
        try:
            if draws and name in OVERWRITING:
                # Changes no shape. To run it without values would import torch's compiler, 70 MB.
                result, made = args[0], [None]
            else:
                result, made = self._call_without_values(function, args, kwargs, makes)
        except (NotImplementedError, RuntimeError) as error:
            return self._call_with_values(function, args, kwargs, bool(written), draws, error)
        if name not in ALLOCATING and (written or any(t is not None for t in made)):
            self._record(function, args, kwargs, made, written, makes)
            if draws:
                number = len(self.tape.operations) - 1
                self.tape.operations[number].origin = self.generators.origin(generator, number)
        return result

    def _call_without_values(
        self, function: Any, args: Any, kwargs: Any, makes: bool
    ) -> tuple[Any, list[torch.Tensor | None]]:
        """The operator's result, as tensors on the meta device, and which of these have new memory."""
        real: dict[int, torch.Tensor] = {}
        """The tensors that a tensor without values stands for, by the key of its memory."""

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return tensor
            other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            real[_key(other)] = tensor
            others.append(other)
            return other

        def original(tensor: torch.Tensor) -> torch.Tensor:
            if _key(tensor) not in real:
                return tensor
            if any(tensor is other for other in others):
                return real[_key(tensor)]
            base = real[_key(tensor)]
            return base.as_strided(tensor.shape, tensor.stride(), base.storage_offset() + tensor.storage_offset())

        others: list[torch.Tensor] = []
        inputs, options = replaced((args, kwargs), torch.Tensor, stand_in)
        if makes or options.get("device") is not None:
            options["device"] = torch.device("meta")
        if "pin_memory" in options:
            options["pin_memory"] = False
        result = function(*inputs, **options)
        old = {_key(tensor) for tensor in leaves((inputs, options), torch.Tensor)}
        made = [None if _key(tensor) in old else tensor for tensor in leaves(result, torch.Tensor)]
        return (replaced(result, torch.Tensor, original) if real else result), made

    def _call_with_values(
        self, function: Any, args: Any, kwargs: Any, writes: bool, draws: bool, error: Exception
    ) -> Any:
        """Operators whose result's shape depends on values, as `nonzero`: the result is kept."""
        if writes or draws:
            raise _refusal(function, error) from error
        inputs, options = replaced((args, kwargs), torch.Tensor, self.value)
        if "device" in options:
            options["device"] = torch.device("cpu")
        try:
            return replaced(function(*inputs, **options), torch.Tensor, self._constant)
        except (NotImplementedError, RuntimeError) as second:
            raise _refusal(function, second) from second

    def _record(
        self, function: Any, args: Any, kwargs: Any, made: list[torch.Tensor | None], written: Any, makes: bool
    ) -> None:
        name = function._schema.name.split("::")[1]
        outputs = [None if tensor is None else self._ref(tensor) for tensor in made]
        new = {ref.cell for ref in outputs if ref is not None}
        writes = {self._ref(tensor).cell for tensor in written}
        only_shape = name.endswith("_like") or name.startswith("new_")
        reading = list(args[1:] if name in OVERWRITING or only_shape else args)
        reads = {self._ref(tensor).cell for tensor in leaves((reading, kwargs), torch.Tensor)}
        whole = name in OVERWRITING and self._ref(args[0]).covers_its_cell()
        overwrites = {self._ref(args[0]).cell} - reads if whole else set()
        self._pending |= {cell for cell in writes if cell.real is not None}

        options = dict(kwargs)
        if makes or options.get("device") is not None:
            options["device"] = torch.device("cpu")
        if "pin_memory" in options:
            options["pin_memory"] = False
        inputs, options = replaced((args, options), torch.Tensor, self._ref)
        self.tape.operations.append(
            Operation(
                function, inputs, options, outputs, reads, writes | new, overwrites | new, torch.get_default_dtype()
            )
        )

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a real construction would have here."""
        return self.tape.value(self._ref(tensor)) if self._is_deferred(tensor) else tensor

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        """A recorded tensor with these values."""
        tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self._record(aten.clone.default, (value,), {}, [tensor], [], False)
        return tensor

    # -- memory --------------------------------------------------------------------------------------------------------

    def _ref(self, tensor: torch.Tensor) -> Ref:
        storage = tensor.untyped_storage()
        known = self._cells.get(storage._cdata)
        if known is None:
            cell = Cell(storage.nbytes(), None if tensor.is_meta else storage)
            # A weak reference also keeps the key from being given to another storage.
            self._cells[storage._cdata] = (StorageWeakRef(storage), cell)
            if not tensor.is_meta and not storage.resizable():
                self._checksums.append((storage, _checksum(storage)))
        else:
            cell = known[1]
            cell.nbytes = max(cell.nbytes, storage.nbytes())
        return Ref(cell, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the memory appears in the recording."""
        return _key(tensor) in self._cells

    def _is_deferred(self, tensor: torch.Tensor) -> bool:
        """Whether the values are not there yet."""
        known = self._cells.get(_key(tensor))
        return tensor.is_meta or (known is not None and known[1] in self._pending)


class _Called(TorchDispatchMode):
    """Sees every operator below autograd."""

    def __init__(self, recording: DeferredInit) -> None:
        super().__init__()
        self.recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to import its compiler, in order to switch it off in here."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(not issubclass(kind, (nn.Parameter, nn.Buffer)) and kind is not torch.Tensor for kind in types):
            return NotImplemented  # A tensor subclass first says what it is made of.
        return self.recording.call(function, args, dict(kwargs or {}))


class _Asked(TorchFunctionMode):
    """Answers what Python code asks of a tensor as a tensor on the CPU would."""

    READERS = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)
    IS_META, IS_CPU, DEVICE = (getattr(torch.Tensor, name).__get__ for name in ("is_meta", "is_cpu", "device"))

    def __init__(self, recording: DeferredInit) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in self.READERS:
            with _disable_current_modes():
                return function(self.recording.value(args[0]), *args[1:], **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        # Some initializers do nothing to tensors that say they are on the meta device.
        if function == self.IS_META:
            return False
        if function == self.IS_CPU:
            return True
        return torch.device("cpu") if function == self.DEVICE and result.type == "meta" else result


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _inner(tensor: Any) -> list[torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)]  # a mesh is none


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += leaves(value, torch.Tensor)
    return found


def _checksum(storage: torch.UntypedStorage) -> int:
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return int(flat.sum(dtype=torch.int64))


def _take(take: Take, name: str, ref: Ref, storage: torch.UntypedStorage) -> None:
    take(name, ref.of(storage))


def _put(put: Callable[[torch.Tensor], None], ref: Ref, grad: bool, storage: torch.UntypedStorage) -> None:
    put(ref.of(storage).clone().requires_grad_(grad))


def _refusal(function: Any, error: Exception) -> ConfigError:
    """The error for what cannot be recorded, with the line of the user's code."""
    place = ""
    frame: FrameType | None = sys._getframe()
    own = (Path(torch.__file__).parent, Path(__file__).parent)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not any(folder in file.parents for folder in own) and file.is_absolute():
            place = f" ({file}:{frame.f_lineno}, in {frame.f_code.co_name})"
            break
        frame = frame.f_back
    return ConfigError(
        f"configure_model calls {function}{place}, which cannot be put off until each process knows its part of the "
        f"model: {str(error).splitlines()[0].rstrip('.')}. Move this to __init__, where it runs as usual."
    )
