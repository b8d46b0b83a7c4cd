"""The precisions of a run by name: dtypes, autocast, loss scaling, and matrix products of 8 bits."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from trainer.compat.names import OTHER_PRECISIONS, SHORT_PRECISIONS
from trainer.errors import ConfigError, first_of, install_command, unknown_name_error

log = logging.getLogger("trainer")

NULL_CONTEXT = nullcontext()
"""A context that does nothing. Shared, because every step enters it."""


@dataclass(frozen=True)
class Precision:
    """A choice of dtypes. Casting is decided here and nowhere else.

    `*-true` stores and computes in one dtype. `*-mixed` keeps fp32 master weights and computes the forward pass under
    `torch.autocast` (https://pytorch.org/docs/stable/amp.html).
    """

    name: str
    weights: torch.dtype
    """Dtype in which parameters (and the optimizer's state) are stored."""
    autocast: torch.dtype | None = None
    """Dtype of autocast during the forward pass; None: no autocast."""
    loss_scaling: bool = False
    """Scale the loss dynamically, because fp16 gradients underflow."""
    float8: Literal["tensorwise", "rowwise", "mx"] | None = None
    """The recipe of torchao by which linear layers compute in 8 bits; a scale is for a tensor, a row, or 32 numbers."""

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
        """Cast floating-point parameters and buffers to the stored dtype of a `*-true` precision, in place.

        Raises:
            ConfigError: the precision is mixed, and a parameter is float16 or bfloat16; or it is one of 8 bits, and no
                linear layer can compute in it.
        """
        restore_linear_layers(module)
        if self.name == "32-true":
            return
        if self.autocast is None:
            module.to(self.weights)
            return
        wrong = {name: p.dtype for name, p in module.named_parameters() if p.dtype in (torch.float16, torch.bfloat16)}
        if wrong:
            name, dtype = next(iter(wrong.items()))
            raise ConfigError(
                f"precision {self.name!r} keeps float32 master weights, but {len(wrong)} parameters are not float32, "
                f"among them {name!r} ({dtype}). Build the module in float32, or use precision='bf16-true'."
            )
        if self.float8 is not None:
            convert_linear_layers(module, self.name, self.float8)

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
        """Return the context in which step methods run on `device`."""
        if self.autocast is not None:
            return torch.autocast(device.type, dtype=self.autocast)
        if self.weights is not torch.float32:
            return default_dtype(self.weights)
        return NULL_CONTEXT

    def init_context(self) -> AbstractContextManager[Any]:
        """Return the context for `configure_model`, in which layers are created in the stored dtype."""
        return default_dtype(self.weights) if self.weights is not torch.float32 else nullcontext()

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return the loss scaler of this precision, or None if it needs none."""
        return torch.amp.GradScaler(device.type) if self.loss_scaling else None


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default of newly created floating tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


PRECISIONS: dict[str, Precision] = {
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
}


def resolve_precision(precision: str | int | Precision) -> Precision:
    """Return the `Precision` for a name of the table, a short name (`16`, `"bf16"`), or an instance.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(precision, Precision):
        return precision
    name = SHORT_PRECISIONS.get(str(precision), str(precision))
    if name not in PRECISIONS:
        raise unknown_name_error("precision", precision, [*PRECISIONS, *SHORT_PRECISIONS], OTHER_PRECISIONS)
    if PRECISIONS[name].float8 is not None and find_spec("torchao") is None:
        raise ConfigError(f"precision={name!r} needs torchao: {install_command('torchao')}")
    return PRECISIONS[name]


# -- matrix products of 8 bits -----------------------------------------------------------------------------------------

NATIVE_FLOAT8 = {"tensorwise": (8, 9), "rowwise": (8, 9), "mx": (10, 0)}
"""The least compute capability of a GPU that multiplies in 8 bits (Ada and Hopper; Blackwell), by recipe."""
MX_BLOCK = 32
"""Neighbouring numbers that share a scale in the formats of https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf."""


def convert_linear_layers(module: nn.Module, name: str, recipe: str) -> None:
    """Have linear layers compute in 8 bits, in place, with the same parameters; the log says which do not, and why.

    Weights, activations and gradients are scaled by their largest value and rounded in each product
    (https://github.com/pytorch/ao/tree/main/torchao/float8). Subclasses of nn.Linear compute in a way of their own, and
    stay as they are.

    Raises:
        ConfigError: no layer can, or torchao does not work with this torch.
    """
    _check_torchao(name)
    multiple = MX_BLOCK if recipe == "mx" else 16  # GPUs multiply matrices of such sizes
    linear = {path: child for path, child in module.named_modules() if isinstance(child, nn.Linear)}
    plain = [path for path, child in linear.items() if type(child) is nn.Linear]
    fits = [path for path in plain if not (linear[path].in_features % multiple or linear[path].out_features % multiple)]
    if not fits:
        raise ConfigError(
            f"precision={name!r}: {type(module).__name__} has no nn.Linear whose sizes are multiples of {multiple}, "
            "and only these compute in 8 bits: use 'bf16-mixed', or other sizes."
        )
    native = has_float8(recipe)
    if recipe == "mx":
        _convert_to_mx([linear[path] for path in fits], native)
    else:
        _convert_to_float8(module, fits, recipe, native)
    reasons = {
        f"because sizes are not multiples of {multiple}": [path for path in plain if path not in fits],
        "because a subclass of nn.Linear may compute something else": [path for path in linear if path not in plain],
    }
    log.info(
        "%s: %d linear layers compute in 8 bits%s%s",
        name,
        len(fits),
        "".join(f"; not, {why}: {first_of(others)}" for why, others in reasons.items() if others),
        "" if native else "; emulated on this machine: the same rounding, but not faster",
    )


def _check_torchao(name: str) -> None:
    """Raise ConfigError if torchao cannot be imported, as 0.18 with torch 2.9."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"precision={name!r}: torchao {version('torchao')} does not work with torch {torch.__version__} ({error}): "
            "update torch (2.13 is tested), or use 'bf16-mixed'."
        ) from error


def _convert_to_float8(module: nn.Module, fits: list[str], recipe: str, native: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linear = {path: module.get_submodule(path) for path in fits}
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not native)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda child, path: path in linear)
    for path, before in linear.items():
        _keep_attributes(before, module.get_submodule(path))


class MXLinear(nn.Linear):
    """A linear layer whose products have a scale of 8 bits for each 32 numbers; made of an nn.Linear by its class."""

    product: Any
    """torchao's product of an input and a weight, with its gradients."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        rows = input.reshape(-1, self.in_features).to(dtype)
        # The gradient of the weight has blocks of rows: zeros fill the last one, and change nothing.
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % MX_BLOCK))
        with torch.autocast(device, enabled=False):
            output = self.product(padded, self.weight.to(dtype))[: len(rows)]
            if self.bias is not None:
                output = output + self.bias.to(dtype)
        result: torch.Tensor = output.reshape(*input.shape[:-1], self.out_features)
        return result


def _convert_to_mx(layers: list[nn.Module], native: bool) -> None:
    try:
        from torchao.prototype.moe_training import mxfp8_linear
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        scaled_mm = mxfp8_linear._to_mxfp8_then_scaled_mm
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"precision='mxfp8' needs the torchao that has it: {install_command('torchao')}; or use 'fp8-rowwise'. "
            f"{error}"
        ) from error
    product = partial(
        scaled_mm,
        kernel_preference=KernelPreference.AUTO if native else KernelPreference.EMULATED,
        scale_calculation_mode=ScaleCalculationMode.RCEIL,
    )
    for layer in layers:
        layer.__class__ = MXLinear
        vars(layer)["product"] = product


def has_float8(recipe: str) -> bool:
    """Whether this machine's GPU multiplies in 8 bits by a recipe; elsewhere that is emulated."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= NATIVE_FLOAT8[recipe]


def restore_linear_layers(module: nn.Module) -> None:
    """Undo `convert_linear_layers`, which an earlier run may have done."""
    for child in module.modules():
        if isinstance(child, MXLinear):
            child.__class__ = nn.Linear  # type: ignore[assignment]
            del child.product
    float8 = sys.modules.get("torchao.float8.float8_linear")
    if float8 is None:
        return
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, float8.Float8Linear):
                linear = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
                linear._parameters.update(child._parameters)
                _keep_attributes(child, linear)
                setattr(parent, name, linear.train(child.training))


def _keep_attributes(before: nn.Module, after: nn.Module) -> None:
    """Give a layer the hooks of the one that it replaces, and the attributes that a user has set."""
    known = {*vars(after), *_OF_FLOAT8}
    vars(after).update({name: value for name, value in vars(before).items() if "hook" in name or name not in known})


_OF_FLOAT8 = ("config", "linear_mm_config", *(f"scaling_type_{what}" for what in ("input", "weight", "grad_output")))
"""The attributes that torchao adds to a layer."""


def tf32_is_allowed() -> bool:
    """Whether float32 matrix products may be computed in TF32, by either of torch's two settings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 warns of its own other setting
            return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by the new API, after which torch refuses to answer by the old one
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
