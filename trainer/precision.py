"""The precisions of a run by name: dtypes, autocast, loss scaling, and matrix products of 8 bits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

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
    float8: Literal["tensorwise", "rowwise"] | None = None
    """The recipe of torchao by which linear layers compute in 8 bits, with one scale for a tensor, or for each row."""

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        """A precision is equal to its name, which is what Lightning's `trainer.precision` is."""
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
    )
}

SHORT_NAMES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "fp16": "16-mixed"}

OTHERS_EQUIVALENTS = {
    **dict.fromkeys(("no", "fp32", "float32", "float", "full"), "'32-true'"),
    **dict.fromkeys(("fp64", "float64", "double"), "'64-true'"),
    **dict.fromkeys(("float16", "half"), "'16-mixed', or '16-true' for weights in float16, too"),
    "bfloat16": "'bf16-mixed', or 'bf16-true' for weights in bfloat16, too",
    **dict.fromkeys(("transformer-engine", "transformer-engine-float16", "te", "float8"), "'fp8' or 'fp8-rowwise'"),
    **dict.fromkeys(("mxfp8", "nvfp4"), "'fp8' or 'fp8-rowwise': formats with a scale for each block are not there"),
}
"""Names of other trainers' and torch's precisions -> the equivalents here."""


def resolve_precision(precision: str | int | Precision) -> Precision:
    """Return the `Precision` for a name of the table, a short name (`16`, `"bf16"`), or an instance.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(precision, Precision):
        return precision
    name = SHORT_NAMES.get(str(precision), str(precision))
    if name not in PRECISIONS:
        raise unknown_name_error("precision", precision, [*PRECISIONS, *SHORT_NAMES], OTHERS_EQUIVALENTS)
    if PRECISIONS[name].float8 is not None and find_spec("torchao") is None:
        raise ConfigError(f"precision={name!r} needs torchao: {install_command('torchao')}")
    return PRECISIONS[name]


# -- matrix products of 8 bits -----------------------------------------------------------------------------------------

MULTIPLE = 16
"""GPUs multiply matrices of 8 bits whose sizes are multiples of this."""
NATIVE_FLOAT8 = (8, 9)
"""The least compute capability of a GPU that multiplies in 8 bits (Ada, Hopper)."""


def convert_linear_layers(module: nn.Module, name: str, recipe: str) -> None:
    """Have linear layers compute in 8 bits, in place, with the same parameters; the log says which do not, and why.

    Weights, activations and gradients are scaled by their largest value and rounded in each product
    (https://github.com/pytorch/ao/tree/main/torchao/float8).

    Raises:
        ConfigError: no layer can.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linear = {path: child for path, child in module.named_modules() if isinstance(child, nn.Linear)}
    fits = [
        path for path, child in linear.items() if not (child.in_features % MULTIPLE or child.out_features % MULTIPLE)
    ]
    if not fits:
        raise ConfigError(
            f"precision={name!r}: {type(module).__name__} has no nn.Linear whose sizes are multiples of {MULTIPLE}, "
            "and only these compute in 8 bits: use 'bf16-mixed', or other sizes."
        )
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not has_float8())
    convert_to_float8_training(module, config=config, module_filter_fn=lambda child, path: path in fits)
    for path in fits:
        _keep_attributes(linear[path], module.get_submodule(path))
    others = [path for path in linear if path not in fits]
    log.info(
        "%s: %d linear layers compute in 8 bits%s%s",
        name,
        len(fits),
        f"; not, because sizes are no multiples of {MULTIPLE}: {first_of(others)}" if others else "",
        "" if has_float8() else "; emulated on this machine: the same rounding, but not faster",
    )


def has_float8() -> bool:
    """Whether this machine's GPU multiplies in 8 bits; elsewhere that is emulated."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= NATIVE_FLOAT8


def restore_linear_layers(module: nn.Module) -> None:
    """Undo `convert_linear_layers`, which an earlier run may have done."""
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
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by the new API, after which torch refuses to answer by the old one
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
