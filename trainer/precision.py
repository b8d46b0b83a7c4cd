"""The precisions of a run by name: dtypes, autocast, loss scaling, and whether matrix products have 8 bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from trainer.compat.names import OTHER_PRECISIONS, SHORT_PRECISIONS
from trainer.errors import ConfigError, install_command, unknown_name_error
from trainer.float8.conversion import convert_linear_layers, restore_linear_layers

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


def tf32_is_allowed() -> bool:
    """Whether float32 matrix products may be computed in TF32, by either of torch's two settings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 warns of its own other setting
            return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by the new API, after which torch refuses to answer by the old one
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
