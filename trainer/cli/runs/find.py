"""Find the runs below a folder, and read from their files what a table of runs shows, without torch and numpy."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.arguments import flat_names
from trainer.errors import ConfigError
from trainer.fault_tolerance.file_lock import FolderLock

METRIC_FILES = ("metrics.csv", "metrics.jsonl")
LOGGED = {"hparams.json", *METRIC_FILES}
"""Files of loggers: a run directory has one of them, or checkpoints."""
CHECKPOINTS = "checkpoints"
OF_CHECKPOINTS = (
    *("*/manifest.json", "*/checkpoint.json", "*/*.safetensors", "last.json", "best.json"),
    *(".tmp-*", ".old-*", ".del-*"),  # left by a process that was killed
)
"""Patterns of files that show a folder to have checkpoints."""
METRICS_SHOWN = 3
MAX_BYTES = 50_000_000
"""Size of the largest JSON file that is read."""


@dataclass
class RunSummary:
    """One run of a listing."""

    path: Path
    name: str
    """The path from the folder that was listed."""
    state: str
    """"running", "finished" (`max_steps` or `max_epochs` was reached), "stopped (REASON)" by the program itself,
    "unfinished", or "no checkpoint"."""
    step: int | None = None
    """Optimizer steps in the last checkpoint, or in the metrics where there is none."""
    epoch: int | None = None
    began: float | None = None
    """Seconds since 1970."""
    seconds: float | None = None
    """Seconds from the first file to the last change of a file."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Values of the best checkpoint, or of the last one; without checkpoints, the last logged ones."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Values by dotted names, such as `module.lr`."""


def find_runs(folder: Path) -> list[RunSummary]:
    """Return the runs below a folder, at any depth, in the order of their paths.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: give the default_root_dir of runs, or a folder above it.")
    return [summary_of(path, folder) for path in sorted(run_directories(folder), key=by_numbers)]


def run_directories(folder: Path) -> Iterator[Path]:
    """Yield the run directories of a folder: itself, and those below. Links are not followed."""
    for path, folders, files in os.walk(folder):
        keeps = CHECKPOINTS in folders and _keeps_checkpoints(Path(path, CHECKPOINTS))
        if keeps or LOGGED & {*files}:
            yield Path(path)
        left_out = ("__pycache__", CHECKPOINTS if keeps else "")
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]


def with_name(place: str, run: Path) -> str:
    """Return the place of a run, and the name that `trainer fit --name` has given it."""
    with suppress(Exception):  # there is none, or it is damaged
        if named := re.search(r"^name: (.+(\n +.*)*)", _text_of(run / "config.yaml"), re.MULTILINE):
            import yaml

            return f"{place} ({yaml.safe_load(named[1])})"
    return place


def _keeps_checkpoints(folder: Path) -> bool:
    """Whether a folder has checkpoints of a run, also unfinished ones, or nothing yet."""
    with suppress(OSError):
        return {*os.listdir(folder)} <= {".lock"} or any(next(folder.glob(one), None) for one in OF_CHECKPOINTS)
    return False


def summary_of(path: Path, folder: Path) -> RunSummary:
    """Return what the files of a run directory say; files that are missing or damaged say nothing."""
    place = str(path.relative_to(folder)) if path != folder else path.absolute().name
    one = RunSummary(path, with_name(place, path), "no checkpoint")
    checkpoints = path / CHECKPOINTS
    manifests = {target.parent.name: read_json(target) for target in checkpoints.glob("*/manifest.json")}
    read = {name: mapping(manifest.get("info")) for name, manifest in manifests.items()}
    infos = {name: _checked(info) for name, info in read.items() if info}
    _fill_in_times(one, infos)
    pointers = [read_json(checkpoints / name).get("checkpoint") for name in ("last.json", "best.json")]
    last, best = (infos.get(str(name)) for name in pointers)
    last = last or max(infos.values(), key=lambda info: info["step"] or 0, default=None)
    if last is not None:
        one.step, one.epoch, one.state = last["step"], last["epoch"], last["state"]
        one.metrics = (best or last)["metrics"]
        if last["captured"] is not None and one.began is not None:
            one.seconds = max(0.0, last["captured"] / 1e9 - one.began)  # a validation may have written here since
    else:
        ends = {name: points[-1] for name, points in read_metrics(path).items()}
        one.metrics = {name: value for name, (_, value) in ends.items()}
        one.step = max((step for step, _ in ends.values()), default=None)
    if any(map(is_locked, (path, checkpoints))):
        one.state = "running"
        one.seconds = None if one.began is None else time.time() - one.began
    one.hyperparameters = _hyperparameters_of(path, checkpoints / next(iter(infos), ""))
    return one


def _hyperparameters_of(path: Path, checkpoint: Path) -> dict[str, Any]:
    """Return the hyperparameters that a logger has written, or else a checkpoint's."""
    saved = mapping(read_json(checkpoint / "checkpoint.json").get("hyperparameters"))
    of_owners = {owner: saved[owner] for owner in ("module", "data") if owner in saved}
    return flat_names(read_json(path / "hparams.json") or of_owners, ".")


def _fill_in_times(one: RunSummary, infos: dict[str, dict[str, Any]]) -> None:
    """Fill in when a run began, and how long it took, by its files and checkpoints."""
    with suppress(OSError):
        times = [entry.stat().st_mtime for entry in os.scandir(one.path)]
        one.began, one.seconds = min(times), max(times) - min(times)
        # A resumed run writes its files again, so their times may be later than its first start.
        one.began = min([one.began, *(info["began"] / 1e9 for info in infos.values() if info["began"])])


def _checked(info: dict[str, Any]) -> dict[str, Any]:
    """Return the info of a checkpoint with values of the right kinds, and its state: anybody may have written it."""
    counters = {name: info.get(name) for name in ("step", "epoch", "began", "captured")}
    found: dict[str, Any] = {name: value if _is_number(value) else None for name, value in counters.items()}
    metrics = mapping(info.get("metrics"))
    found["metrics"] = {name: float(value) for name, value in metrics.items() if _is_number(value)}
    state = f"stopped ({info['stopped']})" if isinstance(info.get("stopped"), str) else "unfinished"
    return found | {"state": "finished" if info.get("finished") is True else state}


def _is_number(value: Any) -> bool:
    """Whether a value is a float, or an integer that fits one."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def is_locked(folder: Path) -> bool:
    """Whether a training writes to the folder now."""
    lock = FolderLock(folder)
    with suppress(OSError):
        if (folder / ".lock").is_file():
            holder = lock.acquire(timeout=0)
            lock.release()
            return holder is not None
    return False


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        return mapping(json.loads(_text_of(file)))
    return {}


def mapping(value: object) -> dict[Any, Any]:
    """Return a value of a file that has to be a dict; an empty one for any other."""
    return value if isinstance(value, dict) else {}


def _text_of(file: Path) -> str:
    """Return the text of a file; an empty one if reading might wait or not end, as at a pipe or a device."""
    return file.read_text(encoding="utf-8") if file.is_file() and file.stat().st_size <= MAX_BYTES else ""


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the logged values of a run by name: the steps and values in `metrics.csv`, else in `metrics.jsonl`.

    Args:
        path: the run directory, or one of the two files.
    """
    files = [path, *(path / name for name in METRIC_FILES)]
    file = next((file for file in files if file.is_file()), path)
    found: dict[str, list[tuple[int, float]]] = {}
    with suppress(OSError, UnicodeDecodeError, csv.Error), open(file, newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines) if file.suffix == ".csv" else map(_row_of_json, lines):
            _add(found, row)
    return found


def _row_of_json(line: str) -> dict[str, Any]:
    """Return the values of a line; none of a damaged line, and of one with media, which have a kind."""
    with suppress(ValueError, RecursionError):
        row = mapping(json.loads(line))
        if not isinstance(row.get("kind"), str):
            return row
    return {}


def _add(found: dict[str, list[tuple[int, float]]], row: dict[str, Any]) -> None:
    """Add the numbers of a row, each with its step; anything may stand in a file of a stranger."""
    with suppress(TypeError, ValueError, KeyError):
        step = int(row["step"])
        for name in [name for name in row if name not in ("step", "epoch", None)]:
            with suppress(TypeError, ValueError):
                point = step, float(row[name])
                found.setdefault(name, []).append(point)


def main_metrics(names: Iterable[str]) -> list[str]:
    """Return the names of a few metrics for a table, validation first."""
    return sorted(names, key=lambda name: (not name.startswith("val"), name))[:METRICS_SHOWN]


def differing(hyperparameters: list[dict[str, Any]]) -> list[str]:
    """Return the names of hyperparameters that are not the same in all runs."""
    known = [values for values in hyperparameters if values]
    names = dict.fromkeys(name for values in known for name in values)
    return [name for name in names if len({repr(values.get(name)) for values in known}) > 1]


def by_numbers(path: Path) -> list[Any]:
    """Sort `version_10` after `version_9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]
