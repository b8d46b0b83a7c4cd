"""CSVLogger: metrics in a CSV file, with the values of a step in one row."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from trainer.arguments import NonNegativeFloat, PositiveInt
from trainer.checkpoint.disk import complete_lines
from trainer.checkpoint.schema import Integer, require
from trainer.errors import ConfigError
from trainer.logger import FileLogger, LogFile, rank_zero_experiment
from trainer.metrics.logger_folder import LoggerFolder, plain_number

Row = dict[str, str]


class CSVLogger(FileLogger):
    """Write `metrics.csv` (one row per step, one column per name, empty where nothing was logged) and `hparams.json`.

    All values logged at one step go into one row, after the step and its epoch. A second value of the same name goes
    into a second row of the step. `validate` and `test` write separate rows for each call. A new name adds a column to
    all rows. A resumed run continues the file, without the rows logged after its checkpoint. Numbers keep all their
    digits. If the file cannot be written (disk full), one warning is logged, and the rows stay in memory until it can.

    Args:
        save_dir: folder of the files. Default: the run directory. If another run has left its file in the folder, the
            new run writes into its subfolder `version_1`, and so on.
        name, version: a subfolder `name/version`, as in Lightning; the version n is the folder `version_n`. Default of
            `version` where `name` is given: the number after the last folder `version_n` there. Read before the run,
            `version` and `log_dir` are those of the run to come.
        prefix: put before all names, with a "-".
        flush_logs_every_n_steps: write after so many steps; None: by time.
        flush_seconds: longest time between two writes to the file, as long as values are logged.
    """

    file_name, label = "metrics.csv", "CSV log:"
    NAME_METRICS_FILE, NAME_HPARAMS_FILE = file_name, "hparams.json"

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: PositiveInt | None = None,
        *,
        flush_seconds: NonNegativeFloat = 5.0,
    ) -> None:
        super().__init__()
        self.place = LoggerFolder(self.file_name, save_dir, name, version)
        self.prefix = prefix
        self.flush_logs_every_n_steps = flush_logs_every_n_steps
        self.flush_seconds = flush_seconds

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """This logger, as its own writer; on other ranks than 0 its calls do nothing."""
        return self

    log_hparams = FileLogger.log_hyperparams

    @property
    def metrics_file_path(self) -> str:
        """The path of the file, as text."""
        return str(self.path)

    # -- state: the newest row, which may not be on the disk when the run is killed ------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        rows, columns = [dict(row) for row in self._file.rows], list(self._file.columns)
        return {"step": self._file.step, "rows": rows, "columns": columns, **self.place.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kind = {"step?": Integer(-1), "rows?": [{str: str}], "columns?": [str], "version?": Integer()}
        require(state_dict, kind, "CSVLogger")
        self.place.restore(state_dict)
        self._resumed = state_dict

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        text = json.dumps(hyperparameters, indent=2, default=str) + "\n"
        self.write_notes(self.NAME_HPARAMS_FILE, text)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = self._step_or(step)
        if not self._writes:
            return
        self.refuse_step(metrics)
        file = self.opened
        cells = {self._prefixed(name): repr(plain_number(value)) for name, value in metrics.items()}
        if self._trainer is not None and step > file.step:
            cells = {"epoch": str(self._trainer.progress.epoch_of_step), **cells}
        file.put(step, cells)
        if self.flush_logs_every_n_steps is not None and step % self.flush_logs_every_n_steps == 0:
            self.flush()
        self.write_if_due()

    def open(self, continue_from: int | None) -> _CsvFile:
        path = self.path
        assert path is not None
        columns, rows = _parse(path, self.earlier_lines())
        if continue_from is not None:
            last = self._resumed.get("step", continue_from)
            columns = self._resumed.get("columns", columns)
            rows = [(step, row) for step, row in rows if step <= last]
            if newest := self._resumed.get("rows"):
                # As they were then: cells that came later come again.
                rows = [*(one for one in rows if one[0] < last), *((last, row) for row in newest)]
        return _CsvFile(path, columns, rows, closes=self._trainer is not None and self._trainer.stage != "fit")


class _CsvFile(LogFile):
    """A CSV file whose rows of the last step can still change, unless it `closes` those that are there."""

    has = "the rows"

    def __init__(self, path: Path, columns: list[str], rows: list[tuple[int, Row]], closes: bool = False) -> None:
        super().__init__(path, is_outdated=True)
        self.columns = columns or ["step"]
        self.step = rows[-1][0] if rows and not closes else -1
        self.rows = [row for step, row in rows if step == self.step]
        """Those of the last step."""
        self._final = rows[: len(rows) - len(self.rows)]
        """The rows before them that are not in the file yet."""
        self._amended: list[tuple[int, Row]] = []
        """Cells to add to rows before the last step."""
        self.write()

    def put(self, step: int, cells: Row) -> None:
        """Add cells to the rows of `step`."""
        new = [name for name in cells if name not in self.columns]
        self.columns += new
        self.is_outdated |= bool(new) or step < self.step
        if step < self.step:  # after training, an older checkpoint may be tested
            self._amended.append((step, cells))
            return
        if step > self.step:
            self._final += [(self.step, row) for row in self.rows]
            self.step, self.rows = step, []
        _place(self.rows, cells)

    def write(self, to_disk: bool = False) -> None:
        """Write all rows; `to_disk`: as in `put_bytes`."""
        with self.writing():
            head = b""
            if self.is_outdated:
                self._take_back()
                head = _csv_line(self.columns)
            final = b"".join(self._line(step, row) for step, row in self._final)
            self.put_bytes(head + final, b"".join(self._line(self.step, row) for row in self.rows), to_disk)
            self._final.clear()

    def _take_back(self) -> None:
        """Have all rows before the last step in memory, with the cells to add, to write the file again."""
        lines = io.BytesIO(b"".join(complete_lines(self.path))[: self._end]).readlines()
        rows: dict[int, list[Row]] = {}
        for step, row in (*_parse(self.path, lines)[1], *self._final):
            rows.setdefault(step, []).append(row)
        for step, cells in self._amended:
            _place(rows.setdefault(step, []), cells)
        self._final = [(step, row) for step, of_step in sorted(rows.items()) for row in of_step]
        self._amended.clear()
        self._end = 0

    def _line(self, step: int, row: Row) -> bytes:
        return _csv_line([str(step), *(row.get(column, "") for column in self.columns[1:])])


def _place(rows: list[Row], cells: Row) -> None:
    """Add cells to the first row of a step without other values of these names, or in a new row."""
    for row in rows:
        if all(row.get(name, cell) == cell for name, cell in cells.items()):
            row.update(cells)
            return
    rows.append({**{name: cell for row in rows[:1] for name, cell in row.items() if name == "epoch"}, **cells})


def _csv_line(cells: list[str]) -> bytes:
    text = io.StringIO()
    # Python's writer leaves a carriage return unquoted: https://github.com/python/cpython/issues/67230
    quotes_all = any("\r" in cell for cell in cells)
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL).writerow(cells)
    return text.getvalue().encode(errors="backslashreplace")


def _parse(path: Path, text: list[bytes]) -> tuple[list[str], list[tuple[int, Row]]]:
    """Return the columns and rows in the lines of a file, without truncated rows."""
    try:
        lines = list(csv.reader(line.decode("utf-8", "replace") for line in text))
    except csv.Error as error:
        raise ConfigError(f"{path} is not a CSV file of a CSVLogger ({error}): move it away.") from error
    if not lines or lines[0][:1] != ["step"]:
        return [], []
    columns = lines[0]
    rows = [
        (int(cells[0]), {name: cell for name, cell in zip(columns[1:], cells[1:], strict=True) if cell})
        for cells in lines[1:]
        if len(cells) == len(columns) and cells[0].isdecimal() and len(cells[0]) < 20
    ]
    return columns, rows
