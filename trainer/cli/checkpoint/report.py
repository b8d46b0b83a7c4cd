"""Format checkpoints for people and programs: the table of `ls` and the page of `show`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.deserialization import TensorInfo
from trainer.cli.columns import fitted_lines, in_columns
from trainer.cli.runs.find import main_metrics, mapping
from trainer.errors import ConfigError, did_you_mean, printable
from trainer.hyperparameters import as_stored, is_numpy_number, is_scalar

if TYPE_CHECKING:
    from trainer.checkpoint.manifest import Manifest
    from trainer.cli.checkpoint.find import CheckpointSummary

TENSORS_SHOWN = 20


def table_of(found: list[CheckpointSummary], metrics: list[str]) -> list[str]:
    """Return a table with a line for each checkpoint; the problems of damaged ones follow it."""
    names = metrics or main_metrics(_metric_names(found))
    head = ["name", "step", "epoch", *map(plain, names), "size", "written", "", "state"]
    rows = [head]
    for one in found:
        known = mapping(one.info.get("metrics"))
        numbers = [one.info.get("step"), one.info.get("epoch"), *map(known.get, names)]
        state = "damaged" if one.damage else "ok"
        sizes = [size(one.bytes), when(one.written), ", ".join(one.pointers), state]
        rows.append([plain(one.path.name), *map(cell, numbers), *sizes])
    size_at, written_at = len(head) - 4, len(head) - 3
    first_to_go = [written_at, 2, *reversed(range(3, size_at)), size_at]
    lines = fitted_lines(rows, range(1, written_at), first_to_go, "--json", beside=2)
    return [f"  {line}" for line in [*lines, *(plain(problem) for one in found for problem in one.damage)]]


def _metric_names(found: list[CheckpointSummary]) -> set[str]:
    return {name for one in found for name in mapping(one.info.get("metrics")) if isinstance(name, str)}


def require_metrics(names: list[str], found: list[CheckpointSummary]) -> None:
    """Raise a ConfigError for the name of a metric that none of the checkpoints has."""
    known = sorted(_metric_names(found))
    for name in names:
        if name not in known:
            there = ", ".join(known) or "none"
            raise ConfigError(f"--metric {name}: no checkpoint has it.{did_you_mean(name, known)} There are: {there}.")


def page_of(path: str, manifest: Manifest, data: dict[str, Any], written: float | None, every: bool) -> Iterator[str]:
    """Yield the lines that describe a checkpoint.

    Args:
        data: the result of `read_metadata`.
        every: list all tensors, not only the first of each file.
    """
    counters = mapping(data.get("progress")) or manifest.info
    facts: dict[str, Any] = {"checkpoint": path, "written": when(written)}
    facts |= {name: counters.get(name) for name in ("step", "epoch", "batch", "samples")}
    known = ("strategy", "precision", "world_size", "seed", "run_dir")
    facts |= {name.replace("_", " "): data.get(name) for name in known}
    facts["versions"] = ", ".join(f"{name} {text_of(value)}" for name, value in mapping(data.get("versions")).items())
    facts["size"] = size(sum(entry.bytes for entry in manifest.files.values()))
    yield from (f"{name:<15} {cell(value)}" for name, value in facts.items() if value is not None)
    given = {name: value for name, value in mapping(data.get("hyperparameters")).items() if name != "kinds"}
    for title, content in (("metrics", mapping(manifest.info.get("metrics"))), ("hyperparameters", given)):
        yield f"\n{title}:{'' if content else ' none'}"
        yield from (f"  {line}" for line in in_columns([(plain(one), cell(value)) for one, value in flat(content)], []))
    for key, content in data.items():
        tensors = list({info.name: info for info in tensors_in(content)}.values())
        if tensors:
            yield ""
            yield from _file(key, manifest, tensors, every)


def _file(key: str, manifest: Manifest, tensors: list[TensorInfo], every: bool) -> Iterator[str]:
    name = f"{key}.safetensors"
    total = manifest.files[name].bytes if name in manifest.files else 0
    yield f"{plain(name)}: {len(tensors)} tensors, {size(total)}"
    shown = tensors if every else tensors[:TENSORS_SHOWN]
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
    """Return data for JSON: keys, nan, infinities and the like as text, tensors as name, dtype and shape."""
    if isinstance(value, dict):
        return {text_of(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if is_numpy_number(value):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if type(value) is int and value.bit_length() > 64:
        return text_of(value)
    if is_scalar(value):
        return value
    if isinstance(value, TensorInfo):
        return {"tensor": value.name, "dtype": value.dtype_name, "shape": list(value.shape)}
    return json_ready(as_stored(value))


def tensors_in(value: Any) -> Iterator[TensorInfo]:
    """Yield the tensors in a part of a checkpoint's metadata, in order."""
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
    elif isinstance(value, TensorInfo):
        yield value


def cell(value: object) -> str:
    """Return a value as text of one line; empty for None."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else plain(text_of(value))


def size(count: int) -> str:
    """Return a number of bytes as text, such as "1.2 MB"."""
    unit = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**unit:.{min(unit, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


def when(seconds: float | None) -> str:
    """Return a time as text, in this machine's time zone."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def text_of(value: object) -> str:
    """Return a value as text; of an integer with too many digits for Python, that it has so many."""
    try:
        return str(value)
    except ValueError:
        return "(a number of thousands of digits)"


def plain(text: str) -> str:
    """Escape line ends and what a terminal would interpret, since checkpoints may come from strangers."""
    return printable(text).replace("\n", "\\n")


def flat(value: dict[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and the values of nested data."""
    for key, item in value.items():
        name = f"{before}{text_of(key)}"
        if isinstance(item, dict):
            yield from flat(item, f"{name}.")
        else:
            yield name, item
