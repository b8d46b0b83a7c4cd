"""PredictionWriter writes every prediction once, in the order of the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, DataModule
from trainer.callbacks import BasePredictionWriter, ModelCheckpoint, PredictionWriter, read_predictions

FORMATS = pytest.mark.parametrize("format", ["safetensors", "jsonl"])


class Predicts(Toy):
    """A module whose prediction is a function of the batch's features."""

    def __init__(self, predict: Any) -> None:
        super().__init__()
        self.predict = predict

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.predict(batch[0])


def features(batches: int = 3) -> torch.Tensor:
    return torch.cat([batch[0] for batch in loader(batches)])


def write(predict: Any, batches: int = 3, **options: Any) -> list[Any]:
    writer = PredictionWriter("out", **options)
    quiet(callbacks=[writer]).predict(Predicts(predict), loader(batches))
    return list(read_predictions("out"))


@FORMATS
@pytest.mark.parametrize("write_interval", ["batch", "epoch"])
def test_one_tensor(format: str, write_interval: str) -> None:
    rows = write(lambda x: 2 * x, format=format, write_interval=write_interval)
    assert torch.equal(torch.stack([torch.as_tensor(row) for row in rows]), 2 * features())


def test_predictions_name_their_checkpoint() -> None:
    first, last = "runs/version_0/checkpoints/step=1", "runs/version_0/checkpoints/step=2"
    checkpoint = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}")
    quiet(callbacks=[checkpoint], enable_checkpointing=True, max_steps=2).fit(Toy(), loader())
    for path in (first, last):
        trainer = quiet(callbacks=[PredictionWriter("out")])
        trainer.predict(Predicts(lambda x: x), loader(), ckpt_path=path, return_predictions=False)
        index = json.loads(Path("out/predictions-rank00000-of-00001.json").read_text())
        assert index["checkpoint"] == str(Path(path).absolute())


@FORMATS
def test_named_tensors(format: str) -> None:
    rows = write(lambda x: {"sum": x.sum(1), "first": x[:, 0]}, format=format)
    assert [row["sum"] for row in rows] == features().sum(1).tolist()
    assert [row["first"] for row in rows] == features()[:, 0].tolist()
    rows = write(lambda x: (x.sum(1), x[:, 0]), format=format)
    assert [row["1"] for row in rows] == features()[:, 0].tolist()


def test_json_of_anything() -> None:
    assert write(lambda x: [f"{len(x)} samples"] * len(x), format="jsonl") == ["4 samples"] * 12
    assert write(lambda x: {"text": ["a"] * 4, "score": x.new_zeros(4)}, format="jsonl")[0] == {"text": "a", "score": 0}
    assert write(lambda x: {"mean": 1.5, "of": x.shape[0]}, format="jsonl") == [{"mean": 1.5, "of": 4}] * 3
    assert write(lambda x: None, format="jsonl") == [None] * 3
    assert write(lambda x: x.new_ones(()), format="jsonl") == [1] * 3


@FORMATS
@pytest.mark.parametrize("write_interval", ["batch", "epoch"])
def test_a_folder_that_cannot_be_written_to_is_named(format: str, write_interval: str) -> None:
    def without_folder(x: torch.Tensor) -> torch.Tensor:
        shutil.rmtree("out", ignore_errors=True)
        return x

    with raises_recorded(ConfigError):
        write(without_folder, format=format, write_interval=write_interval)


@pytest.mark.parametrize(
    "predict",
    [lambda x: "text", lambda x: {"a": x, "b": x[:2]}, lambda x: x.sum(), lambda x: [x], lambda x: {}],
    ids=["text", "sizes", "number", "list", "nothing"],
)
def test_what_safetensors_cannot_hold(predict: Any) -> None:
    with raises_recorded(ConfigError):
        write(predict)


@FORMATS
def test_parts(format: str) -> None:
    rows = write(lambda x: x, batches=5, format=format, max_shard_size=1)
    assert len(rows) == 20
    names = sorted(path.name for path in Path("out").iterdir())
    parts = [f"predictions-rank00000-of-00001-part{n:05d}.{format}" for n in range(5)]
    assert names == [*parts, "predictions-rank00000-of-00001.json"]
    assert json.loads(Path("out", names[-1]).read_text()) == {"parts": parts, "checkpoint": None}
    # Files of an earlier prediction are replaced, all other files stay.
    Path("out/mine.txt").write_text("keep")
    write(lambda x: x, format=format)
    assert len(list(Path("out").iterdir())) == 3


def test_other_shapes_begin_another_part() -> None:
    lengths = iter([2, 2, 3])
    rows = write(lambda x: x.new_zeros(len(x), next(lengths)))
    assert [row.shape for row in rows] == [(2,)] * 8 + [(3,)] * 4
    with safe_open("out/predictions-rank00000-of-00001-part00000.safetensors", framework="pt") as file:
        assert file.metadata() == {"loader": "0", "batches": "[[0, 4], [1, 4]]"}


def test_dtypes_are_kept() -> None:
    assert write(lambda x: x.bfloat16())[0].dtype == torch.bfloat16
    assert write(lambda x: x.bfloat16(), format="jsonl")[0] == features()[0].bfloat16().tolist()


def test_several_loaders_in_their_order() -> None:
    class Two(DataModule):
        def predict_dataloader(self) -> Any:
            return [loader(2), loader(1)]

    quiet(callbacks=[PredictionWriter("out")]).predict(Predicts(lambda x: x), datamodule=Two())
    expected = torch.cat([features(2), features(1)])
    assert torch.equal(torch.stack(list(read_predictions("out"))), expected)


def test_by_default_in_the_run_directory() -> None:
    trainer = quiet(max_epochs=1, callbacks=[PredictionWriter()])
    trainer.fit(Toy(), loader(1))
    trainer.predict(Toy(), loader(2))
    assert len(list(read_predictions(trainer.run_dir / "predictions"))) == 8


def test_next_to_the_checkpoint_unless_another_folder_is_given() -> None:
    trained = quiet(max_epochs=1, default_root_dir="trained", enable_checkpointing=True)
    trained.fit(Toy(), loader(1))
    checkpoint = trained.run_dir / "checkpoints" / "last"
    for root, expected in (("trained", trained.run_dir), ("other", Path("other/version_0"))):
        trainer = quiet(default_root_dir=root, callbacks=[PredictionWriter()])
        trainer.predict(Toy(), loader(2), ckpt_path=checkpoint)
        assert trainer.run_dir.resolve() == expected.resolve()
        assert len(list(read_predictions(expected / "predictions"))) == 8


def test_subclasses_write_what_they_want() -> None:
    class Own(PredictionWriter):
        def __init__(self, **options: Any) -> None:
            super().__init__("out", **options)
            self.seen: list[Any] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
        ) -> None:
            self.seen.append((batch_idx, loader, indices, len(prediction)))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            self.seen.append(len(predictions))

    by_batch, by_epoch = Own(), Own(write_interval="epoch")
    quiet(callbacks=[by_batch]).predict(Toy(), loader(2))
    quiet(callbacks=[by_epoch]).predict(Toy(), loader(2))
    assert by_batch.seen == [(0, 0, [0, 1, 2, 3], 4), (1, 0, [4, 5, 6, 7], 4)]
    assert by_epoch.seen == [2]


def test_predict_returns_predictions_unless_they_are_in_files() -> None:
    """A class of one's own may only count them: packages have one, and use what `predict` returns, as in Lightning."""
    for writer, returned in ((BasePredictionWriter(), 2), (PredictionWriter("out"), None)):
        outputs = quiet(callbacks=[writer]).predict(Toy(), loader(2))
        assert (outputs and len(outputs)) == returned


def test_nothing_or_only_a_part_to_read() -> None:
    with raises_recorded(ConfigError):
        list(read_predictions("nowhere"))
    write(lambda x: x)
    Path("out/predictions-rank00000-of-00001.json").rename("out/predictions-rank00001-of-00002.json")
    with raises_recorded(ConfigError):
        list(read_predictions("out"))
