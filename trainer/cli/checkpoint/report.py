"""Format checkpoints for people and programs: the table of `ls` and the page of `show`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.cli.columns import fitted_lines, in_columns
from trainer.errors import ConfigError, did_you_mean, printable
from trainer.hyperparameters import is_numpy_number, is_scalar

if TYPE_CHECKING:
    from trainer.checkpoint.deserialization import TensorInfo
    from trainer.checkpoint.manifest import Manifest
    from trainer.cli.checkpoint.find import CheckpointSummary

METRICS_SHOWN = 3
TENSORS_SHOWN = 20


def table_of(found: list[CheckpointSummary], metrics: list[str]) -> list[str]:
    """Return a table with a line for each checkpoint; the problems of damaged ones follow it."""
    names = metrics or _main_metrics(found)
    head = ["name", "step", "epoch", *map(plain, names), "size", "written", "", "state"]
    rows = [head]
    for one in found:
        values = one.info.get("metrics")
        known = values if isinstance(values, dict) else {}
        rows.append(
            [
                plain(one.path.name),
                number(one.info.get("step")),
                number(one.info.get("epoch")),
                *(number(known.get(name)) for name in names),
                size(one.bytes),
                when(one.written),
                ", ".join(one.pointers),
                "damaged" if one.damage else "ok",
            ]
        )
    size_at, written_at = len(head) - 4, len(head) - 3
    first_to_go = [written_at, 2, *reversed(range(3, size_at)), size_at]
    lines = fitted_lines(rows, range(1, len(head) - 3), first_to_go, "--json", beside=2)
    return [f"  {line}" for line in [*lines, *(plain(problem) for one in found for problem in one.damage)]]


def _main_metrics(found: list[CheckpointSummary]) -> list[str]:
    """Return the names of a few metrics for the table, those of validation first."""
    return sorted(_metric_names(found), key=lambda name: (not name.startswith("val"), name))[:METRICS_SHOWN]


def _metric_names(found: list[CheckpointSummary]) -> set[str]:
    every = (one.info.get("metrics") for one in found)
    return {name for metrics in every if isinstance(metrics, dict) for name in metrics if isinstance(name, str)}


def require_metrics(names: list[str], found: list[CheckpointSummary]) -> None:
    """Raise a ConfigError for the name of a metric that none of the checkpoints has."""
    known = sorted(_metric_names(found))
    for name in names:
        if name not in known:
            there = f" There are: {', '.join(known)}." if known else " They have none at all."
            raise ConfigError(f"--metric {name}: no checkpoint has it.{did_you_mean(name, known)}{there}")


def page_of(path: str, manifest: Manifest, data: dict[str, Any], written: float | None, every: bool) -> Iterator[str]:
    """Yield the lines that describe a checkpoint.

    Args:
        data: the result of `read_metadata`.
        every: list all tensors, not only the first of each file.
    """
    progress = data.get("progress")
    counters = progress if isinstance(progress, dict) else manifest.info
    yield f"checkpoint      {plain(path)}"
    yield f"written         {when(written)}"
    for name in ("step", "epoch", "batch", "samples"):
        if name in counters:
            yield f"{name:<15} {number(counters[name])}"
    for name in ("strategy", "precision", "world_size", "seed", "run_dir"):
        if name in data:
            yield f"{name.replace('_', ' '):<15} {plain(text_of(data[name]))}"
    versions = data.get("versions")
    if isinstance(versions, dict):
        yield f"versions        {', '.join(plain(f'{name} {text_of(value)}') for name, value in versions.items())}"
    yield f"size            {size(sum(entry.bytes for entry in manifest.files.values()))}"
    given = data.get("hyperparameters")
    given = {name: given[name] for name in given if name != "kinds"} if isinstance(given, dict) else given
    for title, content in (("metrics", manifest.info.get("metrics")), ("hyperparameters", given)):
        rows = [(plain(name), plain(value)) for name, value in _flat("", content)]
        if rows:
            yield ""
            yield f"{title}:"
            yield from (f"  {line}" for line in in_columns(rows, right=[]))
    for key, content in data.items():
        tensors = list({info.name: info for info in tensors_in(content)}.values())
        if tensors:
            yield ""
            yield from _file(key, manifest, tensors, every)


def _file(key: str, manifest: Manifest, tensors: list[TensorInfo], every: bool) -> Iterator[str]:
    name = f"{key}.safetensors"
    entry = manifest.files.get(name)
    total = entry.bytes if entry is not None else 0
    yield f"{plain(name)}: {len(tensors)} tensor{'s' * (len(tensors) > 1)}, {size(total)}"
    shown = tensors if every or len(tensors) <= TENSORS_SHOWN + 2 else tensors[:TENSORS_SHOWN]
    rows = [(plain(t.name), t.dtype_name, str(list(t.shape)), size(t.bytes)) for t in shown]
    yield from (f"  {line}" for line in in_columns(rows, right=[3]))
    if len(shown) < len(tensors):
        yield f"  ... {len(tensors) - len(shown)} more; --all shows them"


def as_data(found: CheckpointSummary) -> dict[str, Any]:
    """Return a checkpoint's description for `--json`."""
    return {
        "path": str(found.path),
        "info": json_ready(found.info),
        "bytes": found.bytes,
        "written": found.written,
        "pointers": found.pointers,
        "damage": found.damage,
    }


def json_ready(value: Any) -> Any:
    """Return data for JSON: keys, nan and infinities as text, tensors as name, dtype and shape."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else text_of(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if is_numpy_number(value):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if is_scalar(value):
        return text_of(value) if type(value) is int and value.bit_length() > 64 else value
    return {"tensor": value.name, "dtype": value.dtype_name, "shape": list(value.shape)}


def tensors_in(value: Any) -> Iterator[TensorInfo]:
    """Yield the tensors in a part of a checkpoint's metadata, in order."""
    if isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif not is_scalar(value):
        yield value


def number(value: object) -> str:
    """Return a cell of a table; empty for None."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else plain(text_of(value))


def size(count: int) -> str:
    """Return a number of bytes as text, such as "1.2 MB"."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def when(seconds: float | None) -> str:
    """Return a time as text, in this machine's time zone."""
    try:
        return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # no time of this age
        return "?"


def text_of(value: object) -> str:
    """Return a value as text; of an integer with too many digits for Python, that it has so many."""
    try:
        return str(value)
    except ValueError:
        return "(a number of thousands of digits)"


def plain(text: str) -> str:
    """Escape line ends and what a terminal would interpret, since checkpoints may come from strangers."""
    return printable(text).replace("\n", "\\n")


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted names and the values of nested data."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name}.{text_of(key)}" if name else text_of(key), item)
    elif value is not None or name:
        yield name, f"{value:.6g}" if isinstance(value, float) else text_of(value)
