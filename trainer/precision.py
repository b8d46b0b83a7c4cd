"""The precisions of a run by name: dtypes, autocast, loss scaling, and whether matrix products have 8 bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import is_parametrized

from trainer.errors import ConfigError, install_command, unknown_name_error
from trainer.float8.conversion import convert_linear_layers, restore_linear_layers
from trainer.names.added import Table
from trainer.names.aliases import SHORT_PRECISIONS
from trainer.names.misses import words_for

NULL_CONTEXT = nullcontext()
"""A context that does nothing. Shared, because every step enters it."""


@dataclass(frozen=True)
class Precision:
    """A choice of dtypes. Casting is decided here and nowhere else.

    `*-mixed` keeps the weights in float32 and computes the forward pass under `torch.autocast`
    (https://pytorch.org/docs/stable/amp.html).

    `*-true` stores weights and computes in one dtype. `64-true` widens everything. In 16 bits only the parameters are
    cast. Buffers (tables of positions, counters, averages), the states of metrics, and complex and quantized tensors
    stay unchanged, because a cast could lose digits for good. So do the float32 parameters of a module that already has
    16-bit ones, because its author chose both. Norms with running statistics are float32, weights and statistics alike,
    since torch wants one dtype for both. Buffers of torch's own layers are cast together with the weights that they are
    multiplied with (spectral norm).
    """

    name: str
    weights: torch.dtype
    """Dtype of the stored parameters (and of the optimizer's state)."""
    autocast: torch.dtype | None = None
    """Dtype of autocast during the forward pass; None: no autocast."""
    loss_scaling: bool = False
    """Scale the loss dynamically, because fp16 gradients underflow."""
    float8: Literal["tensorwise", "rowwise", "mx"] | None = None
    """torchao's recipe for linear layers in 8 bits; a scale is for a tensor, a row, or 32 numbers."""

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        """Whether they are equal. A precision equals its name too, which is what Lightning's `trainer.precision` is."""
        if isinstance(other, str):
            return self.name == other
        return isinstance(other, Precision) and astuple(self) == astuple(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def convert_module(self, module: nn.Module) -> None:
        """Cast the weights to the stored dtype of a `*-true` precision, in place, as the class says.

        Where float32 tensors then meet 16-bit weights, torch's own layers take floating inputs in the dtype of their
        weights.

        Raises:
            ConfigError: the precision is mixed, and a trained parameter is float16 or bfloat16; or it is one of 8 bits,
                and no linear layer can compute in it.
        """
        restore_linear_layers(module)
        if self.autocast is None:
            dtype_of = self.stored_dtypes(module)
            # Torch replaces all shards of a module that has run before, even if their dtype stays the same.
            if any(dtype_of(tensor) is not tensor.dtype for tensor in (*module.parameters(), *module.buffers())):
                module._apply(
                    lambda tensor: tensor if dtype_of(tensor) is tensor.dtype else tensor.to(dtype_of(tensor))
                )
            if self.weights in _LOW:
                _match_inputs(module)
            return
        wrong = {name: p.dtype for name, p in module.named_parameters() if p.requires_grad and p.dtype in _LOW}
        if wrong:
            name, dtype = next(iter(wrong.items()))
            raise ConfigError(
                f"precision {self.name!r} keeps float32 master weights, but {len(wrong)} trained parameters are not "
                f"float32, among them {name!r} ({dtype}). Build the module in float32, freeze them, or use "
                "precision='bf16-true'."
            )
        if self.float8 is not None:
            convert_linear_layers(module, self.name, self.float8)

    def stored_dtypes(self, module: nn.Module) -> Callable[[torch.Tensor], torch.dtype]:
        """Return a function that gives the dtype of a parameter or buffer after `convert_module`."""
        if self.autocast is not None or self.weights is torch.float32:
            return lambda tensor: tensor.dtype
        if self.weights in _LOW:
            casts = _casts_to_16_bits([*module.modules()], self.weights)
            return lambda tensor: casts.get(tensor, tensor.dtype)
        wide = dict.fromkeys(_FLOATING, self.weights) | {torch.complex64: torch.complex128}
        return lambda tensor: tensor.dtype if is_quantized(tensor) else wide.get(tensor.dtype, tensor.dtype)

    def convert_batch(self, batch: Any) -> Any:
        """Cast a floating tensor (one leaf of a batch) to the stored dtype of a `*-true` precision."""
        if self.casts_batch and isinstance(batch, torch.Tensor) and batch.is_floating_point():
            return batch.to(self.weights)
        return batch

    @property
    def casts_batch(self) -> bool:
        """Whether `convert_batch` changes anything."""
        return self.autocast is None and self.weights is not torch.float32

    def forward_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of step methods on `device`."""
        if self.autocast is not None:
            # Without the cache of cast weights: torch would not see that a step has changed a weight (SAM, averages
            # swapped in), and would use the former value.
            return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)
        if self.weights is not torch.float32:
            return default_dtype(self.weights)
        return NULL_CONTEXT

    def update_context(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Return the context for a step method's own backward and optimizer steps; `dtype`: the default outside.

        A backward takes the autocast that is on where it is called, not its forward's.
        """
        if self.autocast is not None:
            return torch.autocast(device.type, enabled=False)
        return default_dtype(dtype) if self.weights is not torch.float32 else NULL_CONTEXT

    def init_context(self, module: nn.Module | None = None) -> AbstractContextManager[Any]:
        """Return the context for `configure_model`. At its end the weights made in it have the stored dtype.

        Args:
            module: the module whose layers are made; None: look only at the new layers.
        """
        if self.weights in _LOW:
            return _cast_when_made(self.weights, module)
        return default_dtype(self.weights) if self.weights is not torch.float32 else nullcontext()

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return the loss scaler of this precision, or None if it needs none."""
        return torch.amp.GradScaler(device.type) if self.loss_scaling else None


_LOW = (torch.bfloat16, torch.float16)
_FLOATING = (*_LOW, torch.float32, torch.float64)
"""The dtypes that are cast; complex ones and 8-bit ones are not."""


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of other tensors, like torchao's; its dtype is then the dtype of its values."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "placements")  # as a DTensor has


def parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a quantized tensor by name; any other value unchanged."""
    if not (isinstance(value, torch.Tensor) and is_quantized(value)):
        yield name, value
        return
    tensor: Any = value
    for part in tensor.__tensor_flatten__()[0]:
        yield from parts_of(f"{name}.{part}", getattr(tensor, part))


def has_statistics(layer: nn.Module) -> bool:
    """Whether a layer is a BatchNorm or the like that keeps running statistics."""
    return isinstance(layer, _NormBase) and layer.running_mean is not None


def multiplies_buffers(layer: nn.Module) -> bool:
    """Whether torch's spectral norm, in its old or new form, or the like multiplies weights of a layer with buffers."""
    if any(type(hook).__module__ == "torch.nn.utils.spectral_norm" for hook in layer._forward_pre_hooks.values()):
        return True
    lists: Any = layer.parametrizations if is_parametrized(layer) else {}
    own = [part for parts in lists.values() for part in parts if type(part).__module__.startswith("torch.nn.utils.")]
    return any(buffer.is_floating_point() for part in own for buffer in part.buffers())


def _casts_to_16_bits(layers: Sequence[nn.Module], low: torch.dtype) -> dict[torch.Tensor, torch.dtype]:
    """Return the dtypes of the tensors to cast, gradients too; see `Precision`."""
    casts: dict[torch.Tensor, torch.dtype] = {}
    is_low = any(parameter.dtype in _LOW for layer in layers for parameter in layer.parameters(recurse=False))
    for layer in layers:
        parameters, buffers = [*layer.parameters(recurse=False)], [*layer.buffers(recurse=False)]
        if has_statistics(layer):
            chosen, dtype = [*parameters, *buffers], torch.float32
        else:
            chosen, dtype = [p for p in parameters if p.dtype in _LOW or not is_low], low
            chosen += buffers if _computes_with_buffers(layer) else []
        chosen += [tensor.grad for tensor in chosen if tensor.grad is not None]
        casts |= {tensor: dtype for tensor in chosen if tensor.dtype in _FLOATING and not is_quantized(tensor)}
    return casts


def _is_of_torch(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("torch.nn.")


def _computes_with_buffers(layer: nn.Module) -> bool:
    """Whether a layer of torch multiplies buffers with weights; losses have theirs alone."""
    return _is_of_torch(layer) and not type(layer).__module__.endswith(".loss")


def _match_inputs(module: nn.Module) -> None:
    """Have torch's layers take floating inputs in the dtype of their weights, if the module has float32 tensors, too.

    A sum of a float32 table and 16-bit numbers is float32, which a 16-bit layer would refuse.
    """
    own_tensors = {
        layer: [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        for layer in module.modules()
        if not has_statistics(layer)
    }
    every = chain.from_iterable(own_tensors.values())
    if not any(tensor.dim() and tensor.dtype in (torch.float32, torch.float64) for tensor in every):
        return
    for layer, own in own_tensors.items():
        takes_floats = _is_of_torch(layer) and bool(own) and own[0].dtype in _FLOATING
        if takes_floats and _cast_inputs not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_cast_inputs, with_kwargs=True)


def _cast_inputs(layer: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    own = next(layer.parameters(), None)
    dtype = next(layer.buffers()).dtype if own is None else own.dtype
    return _cast(args, dtype), {name: _cast(value, dtype) for name, value in options.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return an input, or a tuple of inputs, in another dtype if it is of floating numbers."""
    if type(value) is tuple:
        return tuple([_cast(one, dtype) for one in value])
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in _FLOATING else value


@contextmanager
def _cast_when_made(low: torch.dtype, module: nn.Module | None) -> Iterator[None]:
    """Cast at the end, if layers were made: only then it is known which weights were given a dtype or exact digits."""
    made: dict[nn.Module, None] = {}

    def note(layer: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and name not in layer._parameters:
            made[layer] = None

    with register_module_parameter_registration_hook(note):
        yield
    if made:
        for tensor, dtype in _casts_to_16_bits([*made] if module is None else [*module.modules()], low).items():
            if tensor.dtype is not dtype:
                tensor.data = tensor.data.to(dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default of newly created floating tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


PRECISIONS: Table[Precision] = Table(
    {
        precision.name: precision
        for precision in (
            Precision("32-true", torch.float32),
            Precision("64-true", torch.float64),
            Precision("16-true", torch.float16),
            Precision("bf16-true", torch.bfloat16),
            Precision("16-mixed", torch.float32, autocast=torch.float16, loss_scaling=True),
            Precision("bf16-mixed", torch.float32, autocast=torch.bfloat16),
            Precision("fp8", torch.float32, autocast=torch.bfloat16, float8="tensorwise"),
            Precision("fp8-rowwise", torch.float32, autocast=torch.bfloat16, float8="rowwise"),
            Precision("mxfp8", torch.float32, autocast=torch.bfloat16, float8="mx"),
        )
    },
    "trainer.precisions",
)


def resolve_precision(precision: str | int | Precision) -> Precision:
    """Return the `Precision` for a name of the table, a short name (`16`, `"bf16"`), or an instance.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(precision, Precision):
        return precision
    name = SHORT_PRECISIONS.get(str(precision), str(precision))
    if name not in PRECISIONS:
        words = words_for("precision", [name])
        raise unknown_name_error("precision", precision, [*PRECISIONS, *SHORT_PRECISIONS], words)
    if PRECISIONS[name].float8 is not None and find_spec("torchao") is None:
        raise ConfigError(f"precision={name!r} needs torchao: {install_command('torchao')}")
    return PRECISIONS[name]


def tf32_is_allowed() -> bool:
    """Whether float32 matrix products may be computed in TF32, by either of torch's two settings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 warns about its other setting
            return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by the new API, after which torch refuses to answer by the old one
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
