"""RichModelSummary: the table of layers, drawn by rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.callbacks.model_summary import FIRST_TO_GO, ModelSummary
from trainer.errors import require_package
from trainer.runs.terminal import fitted

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class RichModelSummary(ModelSummary):
    """`ModelSummary` as a table of rich.

    Args:
        max_depth: how many levels of submodules to show; 0: print nothing; -1: all.
        summarize_kwargs: arguments of `rich.table.Table`, such as `header_style`.

    Raises:
        MissingPackageError: at the start of a run, when rich is not installed.
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth)
        self.summarize_kwargs = {"header_style": "bold magenta", **summarize_kwargs}

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        require_package("rich", "RichModelSummary")

    def drawn(self, table: list[tuple[str, ...]], columns: int | None) -> str:
        from rich.console import Console
        from rich.table import Table

        console = Console()
        borders = len(table[0]) + 3  # in addition to the gaps of plain text
        found = fitted(table, columns or console.width, FIRST_TO_GO, beside=borders)
        header, *rows = found.rows
        drawn = Table(**self.summarize_kwargs)
        for number, name in zip(found.kept, header, strict=True):
            drawn.add_column(name, justify="left" if number < 2 else "right")
        for row in rows:
            drawn.add_row(*row, end_section=row is rows[-2] if len(rows) > 1 else False)
        with console.capture() as text:
            console.print(drawn)
        return text.get()
