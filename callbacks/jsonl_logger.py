"""JSONLLogger: metrics, texts, tables and pictures in a file of JSON lines."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from trainer.arguments import NonNegativeFloat, make_folder
from trainer.checkpoint.disk import replace_file
from trainer.checkpoint.schema import Integer, require
from trainer.logger import FileLogger, LogFile
from trainer.metrics.logger_folder import LoggerFolder
from trainer.metrics.media import Images, Media, png

log = logging.getLogger("trainer")


class JSONLLogger(FileLogger):
    """Write `metrics.jsonl`: a line `{"step": 50, "train_loss": 0.3}` each time that values are logged.

    Hyperparameters are a line with `"hyperparameters"`. Texts, tables and histograms are lines with the key and
    `"kind"`; a picture is a PNG file in `media/`, and its line has the path. A resumed run continues the file, without
    the lines written after its checkpoint. Numbers keep all their digits; those that are not finite, which JSON lacks,
    are the texts "NaN", "Infinity" and "-Infinity". When the file cannot be written (disk full), a warning says so
    once, and the lines are kept in memory until it can be.

    Args:
        save_dir: folder of the file. Default: the run directory. If another run has left its file in the folder, the
            new run writes into its subfolder `version_1`, and so on.
        flush_seconds: longest time between two writes to the file, as long as values are logged.
    """

    file_name, label = "metrics.jsonl", "JSON lines:"

    def __init__(self, save_dir: str | Path | None = None, flush_seconds: NonNegativeFloat = 5.0) -> None:
        self.place = LoggerFolder(self.file_name, save_dir)
        self.flush_seconds = flush_seconds
        self._before: list[dict[str, Any]] = []
        """Records of the time before the file is opened, when the step of a resumed run is not known yet."""

    # -- state: the number of lines, to which a resumed run cuts the file ----------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {} if self._file is None else {"lines": self._file.lines, **self.place.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        require(state_dict, {"lines?": Integer(), "version?": Integer()}, "JSONLLogger")
        self._resumed = state_dict
        self.place.restore(state_dict)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._before = [{"step": 0, "hyperparameters": hyperparameters}]

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.refuse_step(metrics)
        self._write({"step": step, **metrics})

    def log_media(self, key: str, media: Media, step: int) -> None:
        values = self._saved(key, media, step) if isinstance(media, Images) else media.record()
        self._write({"step": step, "key": key, "kind": type(media).__name__.lower(), **values})

    # -- the file ------------------------------------------------------------------------------------------------------

    def _write(self, record: dict[str, Any]) -> None:
        if self._writes:
            self.opened.put(record)
            self.write_if_due()

    def _saved(self, key: str, media: Images, step: int) -> dict[str, Any]:
        """Write the pictures as files; return their paths, relative to the folder of the log, and captions."""
        assert self.path is not None
        folder = self.path.parent / "media"
        make_folder(folder, "JSONLLogger(save_dir=...)")
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in key)
        line = self.opened.lines  # keys and steps come again
        paths = [f"media/{name}-{step}-{line}-{number}.png" for number in range(len(media.arrays))]
        for path, array in zip(paths, media.arrays, strict=True):
            try:
                replace_file(self.path.parent / path, png(array))
            except OSError as error:
                log.warning("cannot write %s (%s).", path, error)
        return {"paths": paths, **({} if media.captions is None else {"captions": media.captions})}

    def open(self, continue_from: int | None) -> _LineFile:
        lines = self.earlier_lines()
        assert self.path is not None
        if continue_from is not None:
            before = self._resumed.get("lines")
            if before is None:
                lines = [line for line in lines if continue_from and _step_of(line) <= continue_from]
            else:
                lines = lines[:before]
        file = _LineFile(self.path, lines)
        if not lines:
            for record in self._before:
                file.put(record)
        self._before = []
        return file


class _LineFile(LogFile):
    """A file that grows by lines."""

    has = "the lines"

    def __init__(self, path: Path, kept: list[bytes]) -> None:
        size = path.stat().st_size if path.is_file() and not path.is_symlink() else -1
        end = sum(map(len, kept))
        super().__init__(path, end, is_outdated=size != end)
        self.lines = len(kept)
        """Lines on disk and in memory."""
        self._pending = kept if self.is_outdated else []
        self.write()

    def put(self, record: dict[str, Any]) -> None:
        line = json.dumps(_as_json(record), ensure_ascii=False, default=str)
        self._pending.append(f"{line}\n".encode(errors="replace"))
        self.lines += 1

    def write(self, to_disk: bool = False) -> None:
        """Write the pending lines; `to_disk`: as in `put_bytes`."""
        with self.writing():
            self.put_bytes(b"".join(self._pending), to_disk=to_disk)
            self._pending = []


def _as_json(value: Any) -> Any:
    """Return a value with texts for numbers that are not finite, and for names in dicts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(name): _as_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    return value


def _step_of(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf
