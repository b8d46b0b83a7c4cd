"""PredictionWriter: stream the results of `trainer.predict` to files."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.callback import Callback
from trainer.checkpoint.disk import atomic_file
from trainer.data.transfer import move_to
from trainer.errors import ConfigError, raise_problems, unknown_name_error

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

FORMATS = ("safetensors", "jsonl")


class PredictionWriter(Callback):
    """Write what `predict_step` returns, batch by batch; memory holds one part at most.

    Each process writes `predictions-rank<r>-of-<processes>-part<n>.<format>`, and at the end an index of its parts,
    `predictions-rank<r>-of-<processes>.json`. Files of an earlier prediction in the same folder are replaced. The
    samples of batch `b` are spread over the processes in the order of ranks, so the order of the data is (loader,
    batch, rank, row); `read_predictions` gives the rows in this order.

    `predict_step` returns a tensor, or a dict or tuple of tensors, whose first dimension is that of the batch; with
    "jsonl" lists with one item per sample too, and anything else that JSON can hold, which is then one row.

    To write something else, subclass it and override `write_on_batch_end` or `write_on_epoch_end`.

    Args:
        dirpath: folder of the files. Default: `predictions` in the run directory.
        write_interval: "batch": `write_on_batch_end` after every batch; "epoch": predictions are kept in memory (on the
            CPU) and given to `write_on_epoch_end`.
        format: "safetensors" or "jsonl".
        max_shard_size: bytes after which a new part is started.

    Raises:
        ConfigError: an argument is something else, or `predict_step` returns what the format cannot hold.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        write_interval: str = "batch",
        format: str = "safetensors",
        max_shard_size: int = 64 * 2**20,
    ) -> None:
        problems = []
        if write_interval not in ("batch", "epoch"):
            problems.append(
                str(unknown_name_error("write_interval of PredictionWriter", write_interval, ["batch", "epoch"]))
            )
        if format not in FORMATS:
            problems.append(str(unknown_name_error("format of PredictionWriter", format, FORMATS)))
        raise_problems(problems, "PredictionWriter")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.write_interval = write_interval
        self.format = format
        self.max_shard_size = max_shard_size
        self._kept: list[list[Any]] = []
        self._parts: _Parts | None = None

    # -- to override ---------------------------------------------------------------------------------------------------

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        prediction: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write one batch's prediction; with `write_interval="batch"`."""
        assert self._parts is not None
        self._parts.add(prediction, batch_idx, dataloader_idx)

    def write_on_epoch_end(self, trainer: Trainer, module: TrainModule, predictions: list[list[Any]]) -> None:
        """Write all predictions of this process, one list per loader; with `write_interval="epoch"`."""
        assert self._parts is not None
        for dataloader_idx, of_loader in enumerate(predictions):
            for batch_idx, prediction in enumerate(of_loader):
                self._parts.add(prediction, batch_idx, dataloader_idx)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._kept = []
        folder = self.dirpath if self.dirpath is not None else trainer.run_dir / "predictions"
        self._parts = _Parts(folder, self.format, trainer.rank, trainer.world_size, self.max_shard_size)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.write_interval == "batch":
            self.write_on_batch_end(trainer, module, outputs, batch, batch_idx, dataloader_idx)
            return
        while len(self._kept) <= dataloader_idx:
            self._kept.append([])
        self._kept[dataloader_idx].append(_on_cpu(outputs))

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.write_interval == "epoch":
            self.write_on_epoch_end(trainer, module, self._kept)
            self._kept = []
        assert self._parts is not None
        self._parts.finish()


class _Parts:
    """The part files of one process. A part holds batches of one loader, in order."""

    def __init__(self, folder: Path, format: str, rank: int, world_size: int, max_shard_size: int) -> None:
        self.folder, self.format, self.max_shard_size = folder, format, max_shard_size
        self.stem = f"predictions-rank{rank:05d}-of-{world_size:05d}"
        self.names: list[str] = []
        self.columns: list[dict[str, torch.Tensor]] = []
        """The batches of the part in progress, for safetensors."""
        self.lines: list[str] = []
        """The rows of the part in progress, for JSON lines."""
        self.batches: list[tuple[int, int]] = []
        """The number and the rows of each batch in the part."""
        self.loader = 0
        self.size = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("predictions-rank*-of-*"):
            old = re.match(r"predictions-rank(\d+)-of-\d+[-.]", path.name)
            # Each process removes its own, and rank 0 those of ranks that there are no longer.
            if old and (int(old[1]) == rank or (rank == 0 and int(old[1]) >= world_size)):
                path.unlink()

    def add(self, prediction: Any, batch_idx: int, dataloader_idx: int) -> None:
        if dataloader_idx != self.loader:
            self.close_part()
            self.loader = dataloader_idx
        if self.format == "jsonl":
            rows = [json.dumps(row) for row in _rows(_on_cpu(prediction))]
            place = f'{{"loader": {dataloader_idx}, "batch": {batch_idx}, "row": '
            self.lines += [f'{place}{number}, "prediction": {row}}}\n' for number, row in enumerate(rows)]
            self.size += sum(len(place) + len(row) for row in rows)
            count = len(rows)
        else:
            columns = _columns(prediction)
            if self.columns and not _fit_together(self.columns[-1], columns):
                self.close_part()
            self.columns.append(columns)
            self.size += sum(tensor.nbytes for tensor in columns.values())
            count = len(next(iter(columns.values())))
        self.batches.append((batch_idx, count))
        if self.size >= self.max_shard_size:
            self.close_part()

    def close_part(self) -> None:
        if not self.batches:
            return
        name = f"{self.stem}-part{len(self.names):05d}.{self.format}"
        with atomic_file(self.folder / name) as temporary:
            if self.format == "jsonl":
                temporary.write_text("".join(self.lines), encoding="utf-8")
            else:
                from safetensors.torch import save_file

                together = {key: torch.cat([columns[key] for columns in self.columns]) for key in self.columns[0]}
                about = {"loader": str(self.loader), "batches": json.dumps(self.batches)}
                save_file(together, temporary, metadata=about)
        self.names.append(name)
        self.columns, self.lines, self.batches, self.size = [], [], [], 0

    def finish(self) -> None:
        """Write the last part, and the index, which marks the predictions as complete."""
        self.close_part()
        with atomic_file(self.folder / f"{self.stem}.json") as temporary:
            temporary.write_text(json.dumps({"parts": self.names}) + "\n")


def _on_cpu(prediction: Any) -> Any:
    # Not with `non_blocking`, as batches are moved: a copy to the host would be read before it has arrived.
    return move_to(prediction, lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf)


def _columns(prediction: Any) -> dict[str, torch.Tensor]:
    """Return tensors by name, all with the batch as first dimension. A single tensor is called `prediction`."""
    named = {"prediction": prediction} if isinstance(prediction, torch.Tensor) else prediction
    if isinstance(named, tuple):
        named = {str(number): value for number, value in enumerate(named)}
    if (
        not isinstance(named, Mapping)
        or not named
        or not all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in named.values())
        or len({len(value) for value in named.values()}) != 1
    ):
        raise ConfigError(
            f"PredictionWriter(format='safetensors') got {_describe(prediction)} from predict_step. Return a tensor, "
            "or a dict or tuple of tensors, whose first dimension is that of the batch; or use format='jsonl'."
        )
    return {str(name): value.detach().cpu().contiguous() for name, value in named.items()}


def _describe(prediction: Any) -> str:
    if isinstance(prediction, torch.Tensor):
        return f"a tensor of shape {tuple(prediction.shape)}"
    if isinstance(prediction, Mapping):
        return "{" + ", ".join(f"{name!r}: {_describe(value)}" for name, value in prediction.items()) + "}"
    if isinstance(prediction, tuple):
        return "(" + ", ".join(map(_describe, prediction)) + ")"
    return f"a {type(prediction).__name__}"


def _fit_together(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    described = [[(name, t.dtype, t.shape[1:]) for name, t in columns.items()] for columns in (first, second)]
    return described[0] == described[1]


def _rows(prediction: Any) -> list[Any]:
    """Return one JSON value per sample; a prediction that is not made of samples is one row."""
    if isinstance(prediction, torch.Tensor):
        return prediction.tolist() if prediction.dim() else [prediction.item()]
    if isinstance(prediction, list):
        return [_plain(item) for item in prediction]
    named = dict(enumerate(prediction)) if isinstance(prediction, tuple) else prediction
    if isinstance(named, Mapping) and named:
        parts = {str(name): _plain(value) for name, value in named.items()}
        if all(isinstance(part, list) for part in parts.values()) and len({len(part) for part in parts.values()}) == 1:
            return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
        return [parts]
    return [prediction]


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
        ConfigError: the folder has no predictions, or those of a process are missing or incomplete.
    """
    folder = Path(dirpath)
    indexes = sorted(folder.glob("predictions-rank*-of-?????.json"))
    found = [re.fullmatch(r"predictions-rank(\d+)-of-(\d+)\.json", index.name) for index in indexes]
    ranks = {(int(match[1]), int(match[2])) for match in found if match}
    world_size = max((world for _, world in ranks), default=0)
    missing = [rank for rank in range(world_size) if (rank, world_size) not in ranks]
    if not ranks or missing or len(ranks) != world_size:
        what = f"of ranks {missing}" if missing else "of one run"
        raise ConfigError(
            f"no complete predictions {what} in {folder}: predict with PredictionWriter(dirpath=...) first."
        )
    each = [_batches_of(folder, json.loads(index.read_text())["parts"], rank) for rank, index in enumerate(indexes)]
    for _, rows in heapq.merge(*each, key=lambda batch: batch[0]):
        yield from rows


def _batches_of(folder: Path, parts: list[str], rank: int) -> Iterator[tuple[tuple[int, int, int], list[Any]]]:
    """Yield ((loader, batch, rank), rows) of one process."""
    for name in parts:
        if name.endswith(".jsonl"):
            batches: dict[tuple[int, int, int], list[Any]] = {}
            with open(folder / name, encoding="utf-8") as file:
                for line in map(json.loads, file):
                    batches.setdefault((line["loader"], line["batch"], rank), []).append(line["prediction"])
            yield from batches.items()
        else:
            yield from _batches_in_tensors(folder / name, rank)


def _batches_in_tensors(path: Path, rank: int) -> Iterator[tuple[tuple[int, int, int], list[Any]]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    first = 0
    for batch, count in json.loads(about["batches"]):
        span = range(first, first + count)
        first += count
        if list(columns) == ["prediction"]:
            rows: list[Any] = [columns["prediction"][row] for row in span]
        else:
            rows = [{name: column[row] for name, column in columns.items()} for row in span]
        yield (int(about["loader"]), batch, rank), rows
