"""ModelSummary: print the layers of a model before it is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.arguments import Limit
from trainer.callback import Callback
from trainer.runs.terminal import GAP, columns_of, fitted, padded, wrapped

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


FIRST_TO_GO = (4, 5, 3, 1)
"""The columns that a narrow terminal leaves out, in that order: buffers, MB, trainable, type."""


class ModelSummary(Callback):
    """Print a table of the layers at the start of `fit`, and at its end where the host's time went, on rank 0.

    Args:
        max_depth: how many levels of submodules to show; 0: print nothing; -1: all.
    """

    in_place_of = "enable_model_summary"

    def __init__(self, max_depth: Annotated[int, Limit("from", -1), "0: nothing, -1: all levels"] = 1) -> None:
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.is_global_zero and self.max_depth:
            trainer.print(self.drawn(table_of(pl_module, self.max_depth), columns_of(sys.stdout)))

    def drawn(self, table: list[tuple[str, ...]], columns: int | None) -> str:
        """Return the text of a table, whose first row is the header, and whose last is the total.

        Args:
            columns: the width of the terminal; None: no limit.
        """
        return as_text(table, columns)

    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.is_global_zero and self.max_depth and (line := trainer.run.times.line()):
            trainer.print(wrapped(line, columns_of(sys.stdout)))


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """Return a table with a line for each layer: parameters, trainable ones, buffers, and MB (10^6 bytes) of both.

    A tensor that several layers share counts in each of them, and once in the total. Sharded parameters count with
    their full size. Layers whose shapes are not known yet show `?`.
    """
    return as_text(table_of(module, max_depth))


def table_of(module: nn.Module, max_depth: int) -> list[tuple[str, ...]]:
    """Return the rows of `summarize`: the header, a row for each layer, the total."""
    header = ("layer", "type", "parameters", "trainable", "buffers", "MB")
    lines = [(name, _kind(layer), *_sizes(layer)) for name, layer in _layers(module, max_depth)]
    own = list(module.parameters(recurse=False))
    if own and max_depth != 0:
        lines.append(("(its own)", "Parameter", *_count(own, list(module.buffers(recurse=False)))))
    return [header, *lines, ("total", type(module).__name__, *_sizes(module))]


def as_text(table: list[tuple[str, ...]], columns: int | None = None) -> str:
    """Return the rows as lines, with rules below the header and above the total.

    Args:
        columns: the width of the terminal, whose want of room leaves columns out, and names them; None: no limit.
    """
    found = fitted(table, columns, FIRST_TO_GO)
    widths = [max(map(len, cells)) for cells in zip(*found.rows, strict=True)]
    rule = "-" * (sum(widths) + GAP * (len(widths) - 1))
    header, *lines, total = [_line(row, found.kept, widths) for row in found.rows]
    note = [f"left out: {', '.join(found.left_out)}"] if found.left_out else []
    return "\n".join([header, rule, *lines, *([rule] if lines else []), total, *note])


def _layers(module: nn.Module, max_depth: int) -> list[tuple[str, nn.Module]]:
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]


def _kind(layer: nn.Module) -> str:
    """Return the name of the layer's class; `fully_shard` has made a class of FSDPModule and that one."""
    first, *others = type(layer).__bases__
    return others[0].__name__ if first.__name__ == "FSDPModule" else type(layer).__name__


def _sizes(layer: nn.Module) -> tuple[str, str, str, str]:
    return _count(layer.parameters(), layer.buffers())


def _count(parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> tuple[str, str, str, str]:
    """Return the cells for parameters, trainable ones, buffers and MB."""
    parameters, buffers = list(parameters), list(buffers)
    if any(is_lazy(tensor) for tensor in (*parameters, *buffers)):
        return "?", "?", "?", "?"
    bytes_in_all = sum(_elements(tensor) * tensor.element_size() for tensor in (*parameters, *buffers))
    return (
        f"{sum(map(_elements, parameters)):,}",
        f"{sum(_elements(parameter) for parameter in parameters if parameter.requires_grad):,}",
        f"{sum(map(_elements, buffers)):,}",
        f"{bytes_in_all / 1e6:,.3f}",
    )


def _elements(tensor: torch.Tensor) -> int:
    # A parameter that DeepSpeed has partitioned is empty, and keeps its full size here.
    full: int = tensor.ds_numel if hasattr(tensor, "ds_numel") else tensor.numel()
    return full


def _line(row: Sequence[str], columns: list[int], widths: list[int]) -> str:
    """Align names to the left, numbers to the right."""
    cells = [padded(cell, width, right=column >= 2) for cell, column, width in zip(row, columns, widths, strict=True)]
    return (" " * GAP).join(cells)
