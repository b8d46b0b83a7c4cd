"""A run that has ended changes nothing when the same command starts it again, and is extended as if in one go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.fuzzing import ACCEPTED, WrongError, try_each
from tests.helpers.toy import Toy, loader, quiet
from tests.tiers import Inputs, Numbered
from trainer import Trainer
from trainer.callbacks import (
    CSVLogger,
    EarlyStopping,
    EMAWeightAveraging,
    JSONLLogger,
    ModelCheckpoint,
    RunRecord,
    StochasticWeightAveraging,
    TensorBoardLogger,
)

LOGGERS = {"csv": CSVLogger, "jsonl": JSONLLogger, "tensorboard": TensorBoardLogger}
CHECKPOINTS: list[list[dict[str, Any]]] = [
    [{}],
    [{"every_n_train_steps": 3}],
    [{"monitor": "val_loss"}],
    [{}, {"monitor": "val_loss", "filename": "best-{step}"}],
    [{"every_n_train_steps": 3, "filename": "{step}"}, {"monitor": "val_loss", "save_weights_only": True}],
]
AVERAGES: list[Callable[[], Any] | None] = [
    None,
    lambda: EMAWeightAveraging(decay=0.5),
    lambda: EMAWeightAveraging(decay=0.5, update_starting_at_epoch=0),
    lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2),
]
SIMPLEST: dict[str, Any] = {
    "checkpoints": [{}],
    "average": 0,
    "patience": None,
    "norm": False,
    "loggers": ("csv", "jsonl"),
    "trainer": {"max_epochs": 3},
}


class Net(Toy):
    """Logs means of epochs, a value that never improves, and media; changes its weights at the end of training."""

    def __init__(self, norm: bool) -> None:
        torch.manual_seed(5)
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(self.norm(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("flat", 1.0)

    def on_validation_epoch_end(self) -> None:
        for logger in self.trainer.loggers:
            logger.log_image("picture", torch.zeros(3, 2, 2))

    def on_train_end(self) -> None:
        with torch.no_grad():
            self.layer.weight.mul_(1.5)
        self.log("at the end", 3.0)
        for logger in self.trainer.loggers:
            logger.log_text("note", "the end")


def fit(folder: str, drawn: dict[str, Any], stopping: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    """Start a run, or go on with it; return the trainer and the weights after it."""
    drawn = {**SIMPLEST, **drawn}
    callbacks: list[Any] = [RunRecord(), *(ModelCheckpoint(**one) for one in drawn["checkpoints"])]
    if (average := AVERAGES[drawn["average"]]) is not None:
        callbacks.append(average())
    if drawn["patience"] is not None:
        callbacks.append(EarlyStopping("flat", **{"patience": drawn["patience"], **(stopping or {})}))
    trainer = quiet(
        default_root_dir=folder,
        enable_checkpointing=True,
        log_every_n_steps=2,
        callbacks=callbacks,
        logger=[LOGGERS[name]() for name in drawn["loggers"]],
        **{**drawn["trainer"], **settings},
    )
    module = Net(drawn["norm"])
    trainer.fit(module, loader(8, 2, shuffle=True), loader(2), ckpt_path="last")
    return trainer, [value.clone() for value in module.state_dict().values()]


def files(trainer: Trainer) -> dict[str, tuple[int, bytes]]:
    """Return the time and the content of each file of the run."""
    found = sorted(path for path in trainer.run_dir.rglob("*") if path.is_file())
    return {str(path.relative_to(trainer.run_dir)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def lines(trainer: Trainer) -> list[str]:
    return [(trainer.run_dir / name).read_text() for name in ("metrics.csv", "metrics.jsonl")]


def problem_of(drawn: dict[str, Any], folder: str = "runs") -> str | None:
    """Train, start the same again, and extend it; return what is wrong."""
    first, weights = fit(folder, drawn)
    before = files(first)
    again, same_weights = fit(folder, drawn)
    if again.global_step != first.global_step or not all(map(torch.equal, weights, same_weights)):
        return f"other weights, after {again.global_step} steps and not {first.global_step}"
    if changed := [name for name, _ in files(again).items() ^ before.items()]:
        return f"changed: {sorted(set(changed))}"
    if "max_steps" in drawn["trainer"] or drawn["average"] == 3:
        return None
    more = {"max_epochs": drawn["trainer"]["max_epochs"] + 1}
    (extended, weights), (whole, expected) = fit(folder, drawn, **more), fit(f"{folder}-whole", drawn, **more)
    if extended.global_step != whole.global_step or not all(map(torch.equal, weights, expected)):
        return f"extended: other weights, after {extended.global_step} steps and not {whole.global_step}"
    names = [{path.name for path in (one.run_dir / "checkpoints").iterdir()} for one in (extended, whole)]
    if names[0] != names[1]:
        return f"extended: the checkpoints {sorted(names[0])}, and not {sorted(names[1])}"
    texts = [name for name in ("metrics.csv", "metrics.jsonl") if (whole.run_dir / name).exists()]
    other = [name for name in texts if (whole.run_dir / name).read_text() != (extended.run_dir / name).read_text()]
    return f"extended: {other}" if other else None


def one_run(rng: Numbered) -> str:
    drawn = {
        "checkpoints": rng.choice(CHECKPOINTS),
        "average": rng.choice((0, 1, 2, 3)),
        "patience": rng.choice((None, 1, 2)),
        "norm": rng.random() < 0.3,
        "loggers": rng.sample(sorted(LOGGERS), rng.choice((1, 2, 3))),
        "trainer": rng.choice(({"max_epochs": 2}, {"max_epochs": 3}, {"max_epochs": 3, "max_steps": 7})),
    }
    interval = rng.choice((1.0, 0.5, 3))
    drawn["trainer"] = {**drawn["trainer"], "val_check_interval": interval}
    if (wrong := problem_of(drawn)) is not None:
        raise WrongError(f"{drawn}: {wrong}")
    return ACCEPTED


def test_a_drawn_run_that_has_ended_stays_as_it_is(inputs: Inputs) -> None:
    try_each(islice(inputs, 0, None, 8), one_run)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "drawn",
    [
        {"average": 1, "loggers": ["tensorboard", "csv", "jsonl"]},
        {"trainer": {"max_epochs": 3, "max_steps": 7}, "average": 2},
        {"patience": 2, "average": 2, "trainer": {"max_epochs": 4, "val_check_interval": 0.5}},
        {"patience": 1, "checkpoints": CHECKPOINTS[1], "trainer": {"max_epochs": 4, "val_check_interval": 3}},
        {"average": 3, "norm": True, "checkpoints": CHECKPOINTS[3]},
        {"checkpoints": CHECKPOINTS[4], "trainer": {"max_epochs": 3, "val_check_interval": 0.5}},
    ],
    ids=["epochs", "steps", "within an epoch", "stopped at a saved step", "SWA", "two checkpoints of a step"],
)
def test_a_run_that_has_ended_stays_as_it_is(drawn: dict[str, Any]) -> None:
    if "tensorboard" in drawn.get("loggers", ()):
        pytest.importorskip("tensorboard")
    assert problem_of({**SIMPLEST, **drawn}) is None


@pytest.mark.parametrize(
    ("drawn", "words"),
    [
        ({}, "max_epochs=3 are done; raise it to go on"),
        ({"trainer": {"max_epochs": 3, "max_steps": 6}}, "the checkpoint has 6 steps, and max_steps=6"),
        ({"patience": 1}, "early stopping: flat has not improved in 1 validation; best 1"),
    ],
    ids=["epochs", "steps", "early stopping"],
)
def test_one_line_says_that_nothing_is_left(drawn: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    fit("runs", drawn)
    with caplog.at_level(logging.WARNING, "trainer"):
        fit("runs", drawn)
    messages = [record.message for record in caplog.records if "nothing is left" in record.message]
    assert messages == [f"nothing is left to train: {words}"]


def test_a_longer_run_says_what_depends_on_its_length(caplog: pytest.LogCaptureFixture) -> None:
    class Scheduled(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]

    for epochs in (4, 8):
        caplog.clear()
        swa = StochasticWeightAveraging(0.01, swa_epoch_start=0.5)
        trainer = quiet(max_epochs=epochs, enable_checkpointing=True, callbacks=[swa])
        trainer.fit(Scheduled(), loader(2), ckpt_path="last")
    assert "swa_epoch_start=0.5) was to begin in epoch 1, and begins in epoch 3 now" in caplog.text
    assert "T_max: 8 in the checkpoint, and 16 here" in caplog.text


def test_a_stopped_run_stays_stopped_until_a_setting_of_what_stopped_it_changes() -> None:
    drawn = {"patience": 2, "trainer": {"max_epochs": 5, "val_check_interval": 0.5}}
    stopped, weights = fit("runs", drawn)
    before = files(stopped)
    again, same = fit("runs", drawn, max_epochs=9)
    assert stopped.global_step == again.global_step == 12
    assert all(map(torch.equal, weights, same))
    assert files(again) == before
    longer, _ = fit("runs", drawn, {"patience": 3})
    assert longer.global_step == 16
    other, _ = fit("runs", drawn, {"patience": 3, "min_delta": -2.0})
    assert other.global_step == 40


class EndsBeforeTheEnd(Net):
    def on_train_end(self) -> None:
        super().on_train_end()
        raise RuntimeError("too early")


@pytest.mark.parametrize("drawn", [{}, {"patience": 2, "trainer": {"max_epochs": 5, "val_check_interval": 0.5}}])
def test_a_run_that_died_at_its_end_is_completed(drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected = fit("whole", drawn)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "Net", EndsBeforeTheEnd)
        with pytest.raises(RuntimeError, match="too early"):
            fit("runs", drawn)
    completed, weights = fit("runs", drawn)
    assert all(map(torch.equal, weights, expected))
    assert lines(completed) == lines(whole)
