"""PredictionWriter: stream the results of `trainer.predict` to files."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainer.arguments import PositiveInt, local_path, make_folder, optional_path
from trainer.callback import Callback
from trainer.checkpoint.disk import atomic_file, refuse_link
from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError, shown

if TYPE_CHECKING:
    from trainer.checkpoint.storage import StoragePath
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class WriteInterval(StrEnum):
    """The moments at which predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether `write_on_batch_end` is called."""
        return self is not self.EPOCH

    @property
    def on_epoch(self) -> bool:
        """Whether `write_on_epoch_end` is called."""
        return self is not self.BATCH


class BasePredictionWriter(Callback):
    """Base class of Lightning's prediction writers: subclasses write in `write_on_batch_end` or `write_on_epoch_end`.

    Both are called on every process, with its own predictions.

    Args:
        write_interval: "batch": call `write_on_batch_end` after every batch; "epoch": keep the predictions in memory
            (on the CPU), and call `write_on_epoch_end`; "batch_and_epoch": both.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        self.write_interval, self.interval = write_interval, WriteInterval(write_interval)
        self._kept: list[list[Any]] = []
        self._indices: list[list[Any]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write one batch's prediction.

        Args:
            batch_indices: the indices of the batch's samples in the dataset; empty unless the loader is a DataLoader.
        """

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: TrainModule, predictions: Any, batch_indices: Any
    ) -> None:
        """Write all predictions of this process: a list, or one for each of several loaders. Likewise the indices."""

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._kept = [[] for _ in trainer.num_predict_batches]
        self._indices = [[] for _ in trainer.num_predict_batches]
        for loader in trainer.predict_loaders.values():
            loader.keep_indices()

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = [*trainer.predict_loaders.values()][dataloader_idx]
        indices = loader.indices(0, batch_idx) or []
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            self._kept[dataloader_idx].append(_on_cpu(outputs))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.interval.on_epoch:
            one = len(self._kept) == 1
            predictions, indices = (self._kept[0], self._indices) if one else (self._kept, self._indices)
            self.write_on_epoch_end(trainer, pl_module, predictions, indices)
            self._kept, self._indices = [], []


class PredictionWriter(BasePredictionWriter):
    """Write what `predict_step` returns, batch by batch; memory holds one part at most.

    Each process writes `predictions-rank<r>-of-<processes>-part<n>.<format>`, and at the end an index of its parts with
    the path of the checkpoint, `predictions-rank<r>-of-<processes>.json`. Files of an earlier prediction in the same
    folder are replaced. The samples of a batch are spread over the processes in the order of ranks, so the order of the
    data is (loader, batch, rank, row); `read_predictions` yields the rows in this order. Processes that hold one model
    together count as one.

    `predict_step` returns a tensor, or a dict or tuple of tensors, with the batch as first dimension. With "jsonl" it
    may also return lists with one item per sample, or any other JSON value, which is then one row.

    Args:
        dirpath: folder of the files. Default: `predictions` in the run directory.
        write_interval: "batch": write after every batch; "epoch": keep the predictions in CPU memory until the last
            batch.
        format: "safetensors" or "jsonl".
        max_shard_size: bytes after which a new part begins.

    Raises:
        ConfigError: an argument is not valid, or the format cannot hold the value that `predict_step` returned.
    """

    takes_predictions = True
    agree_on = ("write_interval", "format")

    def __init__(
        self,
        dirpath: str | Path | None = None,
        write_interval: Literal["batch", "epoch"] = "batch",
        format: Literal["safetensors", "jsonl"] = "safetensors",
        max_shard_size: PositiveInt = 64 * 2**20,
    ) -> None:
        super().__init__(write_interval)
        self.dirpath = optional_path(dirpath, "dirpath")
        self.format = format
        self.max_shard_size = max_shard_size
        self._parts: _Parts | None = None
        """The files of this process; None on a process that does not write."""

    def output_location(self) -> tuple[str, Path] | None:
        return None if self._parts is None else ("predictions:", self._parts.folder)

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        super().on_predict_start(trainer, pl_module)
        self._parts = None
        folder = self.dirpath or trainer.run_dir / "predictions"
        if self.dirpath is None:
            refuse_link(folder)
        processes = trainer.strategy.processes
        if processes.reports:
            place = processes.reader, processes.readers
            self._parts = _Parts(folder, self.format, *place, self.max_shard_size, trainer.run.origin)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if self._parts is not None:
            self._parts.add(prediction, batch_idx, dataloader_idx)

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: TrainModule, predictions: Any, batch_indices: Any
    ) -> None:
        of_loaders = [predictions] if len(trainer.predict_loaders) == 1 else predictions
        for dataloader_idx, of_loader in enumerate(of_loaders):
            for batch_idx, prediction in enumerate(of_loader):
                self.write_on_batch_end(trainer, pl_module, prediction, [], None, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        super().on_predict_epoch_end(trainer, pl_module)
        if self._parts is not None:
            self._parts.finish()


class _Parts:
    """The part files of one process. A part holds batches of one loader, in order."""

    def __init__(
        self, folder: Path, format: str, rank: int, world_size: int, max_shard_size: int, origin: StoragePath | None
    ) -> None:
        self.folder, self.format, self.max_shard_size, self.origin = folder, format, max_shard_size, origin
        self.stem = _stem(rank, world_size)
        self.names: list[str] = []
        self.batches: list[tuple[int, int]] = []
        """The number and the rows of each batch in the part."""
        self.contents: list[Any] = []
        """The content of each batch: rows as JSON texts, or tensors by name."""
        self.loader = 0
        self.kind: Any = None
        """The kind of contents, which all batches of a part have in common."""
        self.size = 0
        make_folder(folder, "PredictionWriter(dirpath=...)")
        for path in folder.glob("predictions-rank*-of-*"):
            old = re.match(r"predictions-rank(\d+)-of-\d+[-.]", path.name)
            # Each process removes its old files, and rank 0 the files of ranks that no longer exist.
            if old and (int(old[1]) == rank or (rank == 0 and int(old[1]) >= world_size)):
                path.unlink()

    def add(self, prediction: Any, batch_idx: int, dataloader_idx: int) -> None:
        content: Any
        kind: tuple[Any, ...] = ()
        if self.format == "jsonl":
            content = [json.dumps(row) for row in _rows(_on_cpu(prediction))]
            count, size = len(content), sum(map(len, content))
        else:
            content = _columns(prediction)
            count, size = len(next(iter(content.values()))), sum(tensor.nbytes for tensor in content.values())
            kind = tuple((name, tensor.dtype, tensor.shape[1:]) for name, tensor in content.items())
        if (dataloader_idx, kind) != self.kind:
            self.close_part()
            self.loader, self.kind = dataloader_idx, (dataloader_idx, kind)
        self.batches.append((batch_idx, count))
        self.contents.append(content)
        self.size += size
        if self.size >= self.max_shard_size:
            self.close_part()

    def close_part(self) -> None:
        if not self.batches:
            return
        name = f"{self.stem}-part{len(self.names):05d}.{self.format}"
        with _written(self.folder / name) as temporary:
            if self.format == "jsonl":
                temporary.write_text("".join(self._json_lines()), encoding="utf-8")
            else:
                from safetensors.torch import save_file

                together = {key: torch.cat([content[key] for content in self.contents]) for key in self.contents[0]}
                about = {"loader": str(self.loader), "batches": json.dumps(self.batches)}
                save_file(together, temporary, metadata=about)
        self.names.append(name)
        self.batches, self.contents, self.size = [], [], 0

    def _json_lines(self) -> Iterator[str]:
        for (batch, _), rows in zip(self.batches, self.contents, strict=True):
            prefix = f'{{"loader": {self.loader}, "batch": {batch}, "row": '
            yield from (f'{prefix}{number}, "prediction": {row}}}\n' for number, row in enumerate(rows))

    def finish(self) -> None:
        """Write the last part, and the index, which marks the predictions as complete."""
        self.close_part()
        with _written(self.folder / f"{self.stem}.json") as temporary:
            temporary.write_text(json.dumps({"parts": self.names, "checkpoint": self.origin}, default=str) + "\n")


def _stem(rank: int, world_size: int) -> str:
    return f"predictions-rank{rank:05d}-of-{world_size:05d}"


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end of the block.

    Raises:
        ConfigError: it cannot be written.
    """
    from safetensors import SafetensorError

    try:
        with atomic_file(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot write the predictions {path}: {why}. Make room, or choose PredictionWriter(dirpath=...)."
        ) from error


def _on_cpu(prediction: Any) -> Any:
    # Not with `non_blocking`, as batches are moved: a copy to the host would be read before it has arrived.
    return map_leaves(prediction, lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf)


def _columns(prediction: Any) -> dict[str, torch.Tensor]:
    """Return tensors by name, all with the batch as first dimension. A single tensor is called `prediction`."""
    named = {"prediction": prediction} if isinstance(prediction, torch.Tensor) else prediction
    if isinstance(named, tuple):
        named = {str(number): value for number, value in enumerate(named)}
    # The number of samples of each tensor; None for anything else.
    lengths = {
        len(value) if isinstance(value, torch.Tensor) and value.dim() else None
        for value in (named.values() if isinstance(named, Mapping) else ())
    }
    if len(lengths) != 1 or None in lengths:
        raise ConfigError(
            f"PredictionWriter(format='safetensors') got {shown(prediction)} from predict_step. Return a tensor, or a "
            "dict or tuple of tensors, with the batch as first dimension; or use format='jsonl'."
        )
    return {str(name): value.detach().cpu().contiguous() for name, value in named.items()}


def _rows(prediction: Any) -> list[Any]:
    """Return one JSON value per sample; a prediction that is not made of samples is one row."""
    rows = _plain(dict(enumerate(prediction)) if isinstance(prediction, tuple) else prediction)
    if isinstance(rows, list):
        return rows
    columns = list(rows.values()) if isinstance(rows, dict) else []
    if columns and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return [dict(zip(rows, row, strict=True)) for row in zip(*columns, strict=True)]
    return [rows]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_predictions(dirpath: str | Path) -> Iterator[Any]:
    """Yield the rows that a `PredictionWriter` wrote, of all processes, in the order of the data.

    A row is a tensor (or a dict of tensors) with "safetensors", and a JSON value with "jsonl". One part per process is
    in memory at a time.

    Raises:
        ConfigError: the folder has no predictions, or a process's predictions are missing or incomplete.
    """
    folder = local_path(dirpath, "dirpath")
    indexes = sorted(folder.glob("predictions-rank*-of-?????.json"))
    expected = [f"{_stem(rank, len(indexes))}.json" for rank in range(len(indexes))]
    if not indexes or [index.name for index in indexes] != expected:
        raise ConfigError(
            f"no complete predictions of one run in {folder}: predict with PredictionWriter(dirpath=...) first."
        )
    each = [_batches_of(folder, json.loads(index.read_text())["parts"], rank) for rank, index in enumerate(indexes)]
    for _, rows in heapq.merge(*each, key=lambda batch: batch[0]):
        yield from rows


WrittenBatches = Iterator[tuple[tuple[int, int, int], list[Any]]]
"""((loader, batch, rank), rows) of one process."""


def _batches_of(folder: Path, parts: list[str], rank: int) -> WrittenBatches:
    for name in parts:
        read = _read_json_lines if name.endswith(".jsonl") else _read_tensors
        yield from read(folder / name, rank)


def _read_json_lines(path: Path, rank: int) -> WrittenBatches:
    batches: dict[tuple[int, int, int], list[Any]] = {}
    with open(path, encoding="utf-8") as file:
        for line in map(json.loads, file):
            batches.setdefault((line["loader"], line["batch"], rank), []).append(line["prediction"])
    yield from batches.items()


def _read_tensors(path: Path, rank: int) -> WrittenBatches:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rows: Iterator[Any] = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    if list(columns) == ["prediction"]:
        rows = iter(columns["prediction"])
    for batch, count in json.loads(about["batches"]):
        yield (int(about["loader"]), batch, rank), list(islice(rows, count))
