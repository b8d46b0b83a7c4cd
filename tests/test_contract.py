"""Every strategy of the table trains, evaluates, checkpoints and resumes; a new one is tested by being listed."""

from __future__ import annotations

import csv
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, as_floats, assert_same_bits
from tests.helpers.processes import run_distributed
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import BadStepGuard, CSVLogger, GradNormMonitor, ModelCheckpoint, ReplicaCheck
from trainer.checkpoint.format import read_checkpoint
from trainer.errors import ConfigError
from trainer.strategies import STRATEGIES

DEEPSPEED = ("deepspeed", *(f"deepspeed_stage_{stage}" for stage in ("1", "2", "3", "2_offload", "3_offload")))
PROCESSES = {name: 2 if strategy.multi_process else 1 for name, strategy in STRATEGIES.items()}
"""Numbers of processes with which each strategy is tested."""

ITS_OWN_STEP = DEEPSPEED
"""Their engine steps by itself, so that manual optimization is refused."""
BROKEN_AT_SOME_STEP = tuple(name for name in DEEPSPEED if name not in ("deepspeed_stage_2", "deepspeed_stage_3"))
"""These are broken at one step; the others, of the same kinds, at every step."""

SAMPLES, MICRO_BATCH, WINDOW = 46, 4, 2
EPOCHS = 3
RATE = 0.05


class Classifier(TrainModule):
    """A module with all kinds of state: buffers, dropout, two kinds of schedulers, an epoch's running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=RATE)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.95), "interval": "step"}]


class Gan(TrainModule):
    """Two optimizers, stepped by hand."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(4, 2)
        self.discriminator = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, loss in zip(self.optimizers(), self.losses(batch[0]), strict=True):
            with optimizer.toggle_model():
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    def losses(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        real, made = self.discriminator(x[:, :2]), self.discriminator(self.generator(x[:, 2:]).detach())
        yield softplus(-real).mean() + softplus(made).mean()
        yield softplus(-self.discriminator(self.generator(x[:, 2:]))).mean()

    def configure_optimizers(self) -> Any:
        return [SGD(self.discriminator.parameters(), lr=0.1), AdamW(self.generator.parameters(), lr=1e-2)]


KEPT = ("weights", "optimizer", "scheduler", "progress", "callback metrics", "callback steps", "validations", "rows")
"""Keys that must be the same after a break."""


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


class Remember(Callback):
    """Record what the loop did, step by step, and keep a state of its own."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.steps = self.validations = 0

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch[0][:, 0].tolist())

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps += 1

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.validations += not trainer.sanity_checking

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "validations": self.validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.validations = state["steps"], state["validations"]


def train(
    strategy: str, folder: str, stop_at: int | None = None, go_on: bool = False, interval: int | float = 1.0
) -> dict[str, Any]:
    """Run `fit` with shuffled data in a run directory below `folder`; return what must not depend on a break."""
    remember = Remember()
    trainer = Trainer(
        strategy=strategy,
        devices=PROCESSES[strategy],
        seed=11,
        max_epochs=EPOCHS,
        max_steps=stop_at,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=0.5,
        val_check_interval=interval,
        log_every_n_steps=1,
        callbacks=[
            remember,
            ModelCheckpoint(save_top_k=1),
            ReplicaCheck(every_n_train_steps=1),
            # Both read a number of the device in each step, for which XLA would wait.
            *([] if strategy.startswith("xla") else [BadStepGuard(), GradNormMonitor()]),
        ],
        default_root_dir=folder,
        **{**QUIET, "logger": CSVLogger(), "enable_checkpointing": True},
    )
    module = Classifier()
    loader = DataLoader(make_data(), MICRO_BATCH, shuffle=True)
    trainer.fit(module, loader, DataLoader(make_data(), MICRO_BATCH), ckpt_path="last" if go_on else None)
    with open(next(trainer.run_dir.glob("**/*.csv"))) as file:
        rows = list(csv.reader(file))
    last = next(c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)).last_model_path
    return {
        "keys": list(module.state_dict()),
        "weights": trainer.full_state_dict(everywhere=True),
        "optimizer": read_checkpoint(last)["optimizers"],
        "scheduler": trainer.scheduler_configs[0].scheduler.state_dict(),
        "progress": trainer.progress.state_dict(),
        "callback metrics": as_floats(trainer.callback_metrics),
        "callback steps": remember.steps,
        "validations": remember.validations,
        "batches": remember.batches,
        "rows": rows,
        "run directory": str(trainer.run_dir),
        "checkpoint": last,
    }


def break_at_every_step(strategy: str, folder: str) -> list[int]:
    """Return the steps at which a break changes the result, with validation inside the epochs."""
    uninterrupted = train(strategy, f"{folder}/unbroken", interval=4)
    different = []
    for step in range(1, uninterrupted["progress"]["step"]):
        train(strategy, f"{folder}/{step}", stop_at=step, interval=4)
        resumed = train(strategy, f"{folder}/{step}", go_on=True, interval=4)
        try:
            assert_same_bits({key: uninterrupted[key] for key in KEPT}, {key: resumed[key] for key in KEPT})
        except AssertionError:
            different.append(step)
    return different


def evaluate(strategy: str, checkpoint: str) -> dict[str, Any]:
    """Validate and predict with the weights of a checkpoint, by a new trainer."""
    trainer = Trainer(strategy=strategy, devices=PROCESSES[strategy], **QUIET)
    module, loader = Classifier(), DataLoader(make_data(), MICRO_BATCH)
    (metrics,) = trainer.validate(module, loader, ckpt_path=checkpoint)
    outputs = trainer.predict(module, loader, ckpt_path=checkpoint, return_predictions=True)
    outputs = [output.cpu() for output in outputs or ()]
    return {"metrics": metrics, "predictions": outputs, "keys": list(module.state_dict())}


def frames_to_backward(strategy: str) -> list[str]:
    """Return the names of all frames from `fit` to `loss.backward()`, including torch's own."""
    stacks = []
    backward = torch.Tensor.backward

    def patched(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stacks.append([frame.name for frame in traceback.extract_stack()[:-1]])
        backward(self, *args, **kwargs)

    trainer = Trainer(strategy=strategy, devices=PROCESSES[strategy], max_steps=1, **QUIET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", patched)
        trainer.fit(Classifier(), DataLoader(make_data(), MICRO_BATCH))
    return stacks[0][stacks[0].index("frames_to_backward") + 1 :]


def train_gan(strategy: str) -> dict[str, Any] | str:
    """Train ten steps with two optimizers; return the result, or the reason why the strategy refuses."""
    trainer = Trainer(strategy=strategy, devices=PROCESSES[strategy], max_steps=10, seed=0, **QUIET)
    module = Gan()
    if strategy in ITS_OWN_STEP:
        with pytest.raises(ConfigError) as refused:
            trainer.fit(module, DataLoader(make_data(), MICRO_BATCH))
        return str(refused.value)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit(module, DataLoader(make_data(), MICRO_BATCH))
    weights = trainer.full_state_dict(everywhere=True)
    generator = trainer.optimizers[1]
    return {
        "global_step": trainer.global_step,
        "updates": int(generator.state[module.generator.weight]["step"]),
        "changed": {name: not torch.equal(value, before[name]) for name, value in weights.items()},
        "weights": weights,
    }


@dataclass
class Everything:
    """The runs of one strategy on all of its processes; lists are by rank."""

    strategy: str
    uninterrupted: list[dict[str, Any]]
    stopped: list[dict[str, Any]]
    resumed: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]
    gan: list[Any]
    breaks: list[list[int]]
    frames: list[list[str]]


STOP_AT = 4
"""On one process an epoch has six steps, on two it has three: in the middle of an epoch on both."""


def first_process(strategy: str, folder: str, breaks: bool) -> dict[str, Any]:
    uninterrupted = train(strategy, f"{folder}/uninterrupted")
    return {
        "uninterrupted": uninterrupted,
        "stopped": train(strategy, f"{folder}/broken", stop_at=STOP_AT),
        "evaluated": evaluate(strategy, uninterrupted["checkpoint"]),
        "gan": train_gan(strategy),
        "frames": frames_to_backward(strategy),
        "breaks": break_at_every_step(strategy, folder) if breaks else [],
    }


def second_process(strategy: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(12345)  # A new process has other random numbers than the old one.
    return train(strategy, f"{folder}/broken", go_on=True)


@pytest.fixture(scope="module", params=sorted(PROCESSES))
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Everything:
    """Start the strategy's processes twice: the second start resumes the runs of the first one."""
    strategy, folder = request.param, tmp_path_factory.mktemp(request.param)
    if STRATEGIES[strategy].required_device is not None:
        pytest.skip(
            f"{strategy} is made for {STRATEGIES[strategy].required_device} devices: tests/xla, run by make test-xla"
        )
    return run_everything(strategy, folder, breaks=breaks_are_tested(request))


def breaks_are_tested(request: pytest.FixtureRequest) -> bool:
    """Return True if the test of a break at any step runs in this tier for the fixture's strategy."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = [
        one.callspec.params for one in tests if one.originalname == test_a_break_at_any_step_changes_nothing.__name__
    ]
    return request.param not in BROKEN_AT_SOME_STEP and {"runs": request.param} in cases


def run_everything(strategy: str, folder: Path, timeout: float = 600, breaks: bool = True) -> Everything:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first = run_distributed(first_process, PROCESSES[strategy], strategy, str(folder), breaks, timeout=timeout)
        resumed = run_distributed(second_process, PROCESSES[strategy], strategy, str(folder), timeout=timeout)
    return Everything(strategy, resumed=resumed, **{key: [rank[key] for rank in first] for key in first[0]})


def test_it_trains(runs: Everything) -> None:
    for rank in runs.uninterrupted:
        losses = rank["callback metrics"]
        assert losses["val_loss"] < 0.9 < math.log(3)
        assert rank["progress"]["samples"] == EPOCHS * SAMPLES
    assert_same_bits(runs.uninterrupted[0]["weights"], runs.uninterrupted[-1]["weights"])


def test_every_sample_is_seen_once_an_epoch(runs: Everything) -> None:
    expected = sorted(make_data().tensors[0][:, 0].tolist() * EPOCHS)
    seen = [value for rank in runs.uninterrupted for batch in rank["batches"] for value in batch]
    assert sorted(seen) == expected


def test_it_evaluates_every_sample_once(runs: Everything) -> None:
    module = Classifier()
    module.load_state_dict(runs.uninterrupted[0]["weights"])
    module.eval()
    x, y = make_data().tensors
    with torch.no_grad():
        logits = module(x)
    for rank in runs.evaluated:
        assert rank["metrics"] == pytest.approx({"val_loss": cross_entropy(logits, y).item()}, rel=1e-5, abs=1e-6)
    assert runs.uninterrupted[0]["callback metrics"]["val_loss"] == pytest.approx(
        rank["metrics"]["val_loss"], rel=1e-5, abs=1e-7
    )
    predicted = torch.cat([batch for rank in runs.evaluated for batch in rank["predictions"]])
    assert predicted.shape == logits.shape
    torch.testing.assert_close(predicted.sort(0).values, logits.sort(0).values)


def test_state_dict_has_the_keys_of_the_plain_module(runs: Everything) -> None:
    for rank in range(len(runs.uninterrupted)):
        keys = list(Classifier().state_dict())
        assert (
            list(runs.uninterrupted[rank]["weights"])
            == runs.uninterrupted[rank]["keys"]
            == runs.evaluated[rank]["keys"]
            == keys
        )


def test_a_checkpoint_is_read_without_a_trainer(runs: Everything) -> None:
    module = Classifier.load_from_checkpoint(runs.uninterrupted[0]["checkpoint"])
    assert_same_bits(module.state_dict(), runs.uninterrupted[0]["weights"])


def test_a_stopped_run_ends_with_the_same_bits(runs: Everything) -> None:
    for uninterrupted, stopped, resumed in zip(runs.uninterrupted, runs.stopped, runs.resumed, strict=True):
        assert stopped["progress"]["step"] == STOP_AT
        assert 0 < stopped["progress"]["batch"] < len(uninterrupted["batches"]) // EPOCHS
        assert stopped["run directory"] == resumed["run directory"]
        for key in KEPT:
            assert_same_bits(uninterrupted[key], resumed[key], key)
        assert stopped["batches"] + resumed["batches"] == uninterrupted["batches"]


def test_a_break_at_any_step_changes_nothing(runs: Everything) -> None:
    if runs.strategy in BROKEN_AT_SOME_STEP:
        pytest.skip("of its kind: broken at one step only, since each start of the engine takes its time")
    for rank in runs.breaks:
        assert rank == []


def test_a_stopped_run_ends_with_the_same_rows_in_its_log(runs: Everything) -> None:
    rows = runs.uninterrupted[0]["rows"]
    assert runs.resumed[0]["rows"] == rows
    assert len(rows) - 1 >= runs.uninterrupted[0]["progress"]["step"]
    assert {"step", "loss_step", "loss_epoch", "val_loss", "largest"} <= set(rows[0])


def test_backward_is_four_frames_away_from_fit(runs: Everything) -> None:
    for rank in runs.frames:
        assert rank[:4] == ["fit", "_train_epoch", "_train_step", "backward"]
        assert len(rank) == 4 or runs.strategy in ITS_OWN_STEP  # DeepSpeed's engine adds frames


def test_ten_steps_of_two_optimizers_are_ten_steps(runs: Everything) -> None:
    for rank in runs.gan:
        if runs.strategy in ITS_OWN_STEP:
            assert "cannot do manual optimization" in rank
            assert "Use automatic optimization, or strategy 'ddp' or 'fsdp'" in rank
            continue
        assert rank["global_step"] == rank["updates"] == 10
        assert all(rank["changed"].values())
        assert_same_bits(rank["weights"], runs.gan[0]["weights"])


def test_a_scheduler_steps_once_a_step_on_any_number_of_processes(runs: Everything) -> None:
    for rank in runs.uninterrupted:
        steps = EPOCHS * math.ceil(math.ceil(SAMPLES / (MICRO_BATCH * len(runs.uninterrupted))) / WINDOW)
        assert rank["progress"]["step"] == rank["scheduler"]["last_epoch"] == rank["callback steps"] == steps
        assert rank["scheduler"]["_last_lr"] == pytest.approx([RATE * 0.95**steps])


def test_the_same_work_on_one_and_two_processes_takes_as_many_steps(tmp_path: Path) -> None:
    """Half the micro-batch on two processes is the same global batch."""
    ends = run_distributed(steps_and_rates, 2, MICRO_BATCH // 2)
    assert ends[0] == ends[1] == steps_and_rates(MICRO_BATCH)


def steps_and_rates(micro_batch: int) -> tuple[int, list[float]]:
    rates = []

    class Rate(Callback):
        def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = Trainer(max_epochs=2, accumulate_grad_batches=WINDOW, callbacks=Rate(), **QUIET)
    module = Classifier()
    module.layers[1] = nn.Identity()  # Batch norm refuses a micro-batch of one sample.
    trainer.fit(module, DataLoader(make_data(), micro_batch))
    return trainer.global_step, rates
