"""Recording what is done to tensors while they have no values."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainer.errors import ConfigError
from trainer.model.tape import GeneratorTrace, Operation, Origin, Storage, Tape, TensorView, leaves, replaced

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


class Recorder:
    """Within `recording()`, tensors are made without values, and operators that are called on them go on a tape.

    Tensors that Python code makes on the meta device itself are left to it.
    """

    def __init__(self) -> None:
        self.tape = Tape()
        self._generators = GeneratorTrace()
        self._cells: dict[int, tuple[StorageWeakRef, Storage]] = {}
        self._pending: set[Storage] = set()
        """Memory from before that recorded operations write."""
        self._checksums: list[tuple[torch.UntypedStorage, int]] = []
        self.meta_requested = False
        """Whether Python code has asked for the meta device in the call that is going on."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Leaves torch's default generator as it was."""
        start = torch.default_generator.get_state()
        self._generators.origin(torch.default_generator)
        try:
            with warnings.catch_warnings():
                # It is none: the copy is recorded.
                no_copy = ".*copying from a non-meta parameter in the checkpoint to a meta"
                warnings.filterwarnings("ignore", no_copy, UserWarning)
                with _FunctionMode(self), _DispatchMode(self):
                    yield
        finally:
            self.ends: list[tuple[torch.Generator, Origin]] = self._generators.ends()
            """The generators, and where the states come from that they are to have after all operations."""
            torch.default_generator.set_state(start)

    def changed_memory(self) -> bool:
        """Whether memory that torch does not own has changed since an operation read it."""
        return any(_checksum(storage) != checksum for storage, checksum in self._checksums)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, or record it."""
        given = leaves((args, kwargs), torch.Tensor)
        if function is aten.lift_fresh.default:  # torch.tensor([...])
            return self._constant(args[0]) if args[0].numel() else args[0]
        draws = torch.Tag.nondeterministic_seeded in function.tags
        makes = self._makes(function, given, kwargs)
        written = _written(function, args, kwargs)
        if all(map(self._is_bare, given)) and not makes:
            return function(*args, **kwargs)
        if not (draws or makes or any(map(self.is_deferred, given)) or any(map(self.is_known, written))):
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
        for tensor in made:
            if tensor is not None:
                self._register(tensor)
        if name not in ALLOCATING and (written or any(t is not None for t in made)):
            self._record(function, args, kwargs, made, written, makes)
            if draws:
                number = len(self.tape.operations) - 1
                self.tape.operations[number].origin = self._generators.origin(generator, number)
        return result

    def _makes(self, function: Any, given: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether it makes a tensor out of none, or out of the shape of one that has no values in reality either."""
        if not all(map(self._is_bare, given)) or not any(a.name == "device" for a in function._schema.arguments):
            return False
        device = kwargs.get("device")
        if device is not None and device.type != "meta":
            return True
        # torch itself asks for the meta device when it makes something for a tensor without values.
        return not given and not (device is not None and self.meta_requested)

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
        outputs = [None if tensor is None else self.ref(tensor) for tensor in made]
        new = {ref.cell for ref in outputs if ref is not None}
        writes = {self.ref(tensor).cell for tensor in written}
        only_shape = name.endswith("_like") or name.startswith("new_")
        reading = list(args[1:] if name in OVERWRITING or only_shape else args)
        reads = {self.ref(tensor).cell for tensor in leaves((reading, kwargs), torch.Tensor)}
        whole = name in OVERWRITING and self.ref(args[0]).covers_its_cell()
        overwrites = {self.ref(args[0]).cell} - reads if whole else set()
        self._pending |= {cell for cell in writes if cell.real is not None}

        options = dict(kwargs)
        if makes or options.get("device") is not None:
            options["device"] = torch.device("cpu")
        if "pin_memory" in options:
            options["pin_memory"] = False
        inputs, options = replaced((args, options), torch.Tensor, self.ref)
        self.tape.operations.append(
            Operation(
                function, inputs, options, outputs, reads, writes | new, overwrites | new, torch.get_default_dtype()
            )
        )

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a real construction would have here."""
        return self.tape.value(self.ref(tensor)) if self.is_deferred(tensor) else tensor

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        """A recorded tensor with these values."""
        tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self._register(tensor)
        self._record(aten.clone.default, (value,), {}, [tensor], [], False)
        return tensor

    # -- memory --------------------------------------------------------------------------------------------------------

    def ref(self, tensor: torch.Tensor) -> TensorView:
        """The tensor as it is on the tape."""
        storage = tensor.untyped_storage()
        known = self._cells.get(storage._cdata)
        if known is None and tensor.is_meta:
            cell = Storage(storage.nbytes())  # made by Python code, and not ours
        elif known is None:
            cell = self._register(tensor)
            if not storage.resizable():
                self._checksums.append((storage, _checksum(storage)))
        else:
            cell = known[1]
            cell.nbytes = max(cell.nbytes, storage.nbytes())
        return TensorView(cell, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _register(self, tensor: torch.Tensor) -> Storage:
        storage = tensor.untyped_storage()
        cell = Storage(storage.nbytes(), None if tensor.is_meta else storage)
        # A weak reference also keeps the key from being given to another storage.
        self._cells[storage._cdata] = (StorageWeakRef(storage), cell)
        return cell

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the memory appears on the tape."""
        return _key(tensor) in self._cells

    def is_deferred(self, tensor: torch.Tensor) -> bool:
        """Whether the values are not there yet."""
        known = self._cells.get(_key(tensor))
        return known is not None and (known[1].real is None or known[1] in self._pending)

    def _is_bare(self, tensor: torch.Tensor) -> bool:
        """Whether Python code has made it on the meta device, and it is to have no values."""
        return tensor.is_meta and not self.is_known(tensor)


class _DispatchMode(TorchDispatchMode):
    """Sees every operator below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to import its compiler, in order to switch it off in here."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(not issubclass(kind, (nn.Parameter, nn.Buffer)) and kind is not torch.Tensor for kind in types):
            return NotImplemented  # A tensor subclass first says what it is made of.
        return self.recorder.call(function, args, dict(kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    """Answers what Python code asks of a tensor as a tensor on the CPU would."""

    READERS = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)
    IS_META, IS_CPU, DEVICE = (getattr(torch.Tensor, name).__get__ for name in ("is_meta", "is_cpu", "device"))

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in self.READERS:
            with _disable_current_modes():
                return function(self.recorder.value(args[0]), *args[1:], **(kwargs or {}))
        device = (kwargs or {}).get("device")
        self.recorder.meta_requested = device == "meta" or (isinstance(device, torch.device) and device.type == "meta")
        try:
            result = function(*args, **(kwargs or {}))
        finally:
            self.recorder.meta_requested = False
        # Some initializers do nothing to tensors that say they are on the meta device.
        if function in (self.IS_META, self.IS_CPU, self.DEVICE) and self.recorder.is_deferred(args[0]):
            return {self.IS_META: False, self.IS_CPU: True, self.DEVICE: torch.device("cpu")}[function]
        return result


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


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
