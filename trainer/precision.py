"""The precisions of a run by name: dtypes, autocast and loss scaling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, unknown_name_error

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

    def convert_module(self, module: nn.Module) -> None:
        """Cast floating-point parameters and buffers to the stored dtype of a `*-true` precision, in place.

        Raises:
            ConfigError: the precision is mixed, and a parameter is float16 or bfloat16.
        """
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
    )
}

SHORT_NAMES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "fp16": "16-mixed"}

OTHERS_EQUIVALENTS = {
    **dict.fromkeys(("no", "fp32", "float32", "float", "full"), "'32-true'"),
    **dict.fromkeys(("fp64", "float64", "double"), "'64-true'"),
    **dict.fromkeys(("float16", "half"), "'16-mixed', or '16-true' for weights in float16, too"),
    "bfloat16": "'bf16-mixed', or 'bf16-true' for weights in bfloat16, too",
    "fp8": "'bf16-mixed': there is no precision of 8 bits",
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
    return PRECISIONS[name]


def tf32_is_allowed() -> bool:
    """Whether float32 matrix products may be computed in TF32, by either of torch's two settings."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by the new API, after which torch refuses to answer by the old one
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
