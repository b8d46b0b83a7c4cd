"""Numbers that are not finite are reported, and never replace the last finite checkpoint."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.callbacks import BadStepGuard, ModelCheckpoint, WeightAveraging
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.finite import floating_tensors, not_finite
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.retention import Retention


class Spoilt(Toy):
    """The loss is NaN from a step on; a mask has -inf from the start, and another one from the first forward on."""

    def __init__(self, step: int = 5) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.spoilt_at = step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.tensor([-math.inf]))
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.global_step + 1 == self.spoilt_at else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", -float(self.global_step))  # the later the better


def train(folder: Path, module: TrainModule, steps: int = 12, ckpt_path: Any = None, **options: Any) -> ModelCheckpoint:
    before = options.pop("before", [])
    checkpoint = ModelCheckpoint(**{"every_n_train_steps": 2, **options})
    module.strict_loading = False  # of the buffer that comes late
    trainer = quiet(
        default_root_dir=folder,
        max_steps=steps,
        callbacks=[*before, checkpoint],
        enable_checkpointing=True,
        val_check_interval=2,
    )
    trainer.fit(module, loader(8), loader(1), ckpt_path=ckpt_path)
    return checkpoint


def steps_in(folder: Path) -> dict[str, int]:
    """Return the steps of the checkpoints, and of the pointers."""
    directory = CheckpointDirectory(folder / "version_0" / "checkpoints")
    found = {path.name: directory.info(path)["step"] for path in directory.list()}
    for pointer in ("last", "best"):
        if (target := directory.pointer(pointer)) is not None:  # type: ignore[arg-type]
            found[f"-> {pointer}"] = directory.info(target)["step"]
    return found


@pytest.mark.parametrize(
    ("options", "spoilt", "resumed"),
    [
        ({}, {4, 12}, {12}),
        ({"async_save": True}, {4, 12}, {12}),
        ({"save_top_k": 2}, {2, 4, 12}, {10, 12}),
        ({"save_top_k": -1}, {2, 4, 6, 8, 10, 12}, {2, 4, 6, 8, 10, 12}),
        ({"save_last": False}, {4, 12}, {12}),
        ({"monitor": "val_loss", "mode": "min"}, {4, 12}, {12}),
        ({"monitor": "val_loss", "mode": "min", "async_save": True}, {4, 12}, {12}),
        ({"monitor": "val_loss", "mode": "max"}, {2, 4, 12}, {2, 12}),
        ({"filename": "model"}, {4, 12}, {12}),
    ],
    ids=["default", "async", "two", "all", "no last", "min", "min async", "max", "one name"],
)
def test_the_last_finite_checkpoint_stays(
    options: dict[str, Any], spoilt: set[int], resumed: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        checkpoint = train(tmp_path, Spoilt(), **options)
    found = steps_in(tmp_path)
    assert {step for name, step in found.items() if not name.startswith("->")} == spoilt
    assert found["-> last"] == 4
    assert checkpoint.last_model_path.endswith(checkpoint.last or "none")
    if "monitor" in options:
        assert found["-> best"] == (4 if options["mode"] == "min" else 2)
        assert checkpoint.best_model_score == -found["-> best"]
    messages = [record.message for record in caplog.records if "is written for you to look at" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith("step 6: weights or optimizer states are not finite (model.layer.weight, ")
    assert messages[0].endswith(f"and 'last' still points to {checkpoint.last}.")

    train(tmp_path, Spoilt(99), ckpt_path="last", **options)
    found = steps_in(tmp_path)
    assert {step for name, step in found.items() if not name.startswith("->")} == resumed
    assert found["-> last"] == 12
    again = CheckpointDirectory(tmp_path / "version_0" / "checkpoints")
    state = read_checkpoint(again.resolve("last"))
    assert not_finite(floating_tensors(state["model"], "model")) == ["model.mask", "model.late"]


class SetInfinite(Callback):
    """Write an infinity into a tensor after a step."""

    def __init__(self, what: str, step: int = 3) -> None:
        self.what, self.step = what, step

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step != self.step:
            return
        with torch.no_grad():
            if self.what == "buffer":
                module.get_buffer("seen").fill_(math.nan)
            elif self.what == "average":
                first = next(iter(trainer.optimizers[0].state.values()))["momentum_buffer"]
                first.view(-1)[0] = math.inf
            elif self.what == "schedule":
                trainer.lr_scheduler_configs[0].scheduler.memory = math.nan
            elif self.what == "option":
                trainer.optimizers[0].param_groups[0]["weight_decay"] = math.nan
            else:
                next(module.parameters()).view(-1)[0] = -math.inf


class Remembering(torch.optim.lr_scheduler.LRScheduler):
    """A constant rate, with numbers that later rates could depend on; one is infinite from the start."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.memory, self.best = 0.0, math.inf
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


class WithMomentum(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [Remembering(optimizer)]


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("buffer", "model.seen"),
        ("average", "optimizers.0.state.layer.weight.momentum_buffer"),
        ("weight", "model.layer.weight"),
        ("option", "optimizers.0.param_groups.0.weight_decay"),
        ("schedule", "schedulers.0.memory"),
    ],
)
def test_each_part_of_the_state_is_looked_at(what: str, name: str, tmp_path: Path) -> None:
    checkpoint = train(tmp_path, WithMomentum(), steps=3, every_n_train_steps=1, before=[SetInfinite(what)])
    directory = CheckpointDirectory(tmp_path / "version_0" / "checkpoints")
    assert directory.info("epoch=0-step=3")["nonfinite"] == [name]
    assert checkpoint.nonfinite == ["epoch=0-step=3"]
    assert checkpoint.last == "epoch=0-step=2"


class Average(Callback):
    """Average the weights; the average is spoilt at step 5. `unknown` is not a number until then."""

    def __init__(self) -> None:
        self.average, self.unknown = torch.zeros(4), torch.tensor(math.nan)

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.average.lerp_(module.get_parameter("layer.weight").detach().view(-1), 0.1)
        if trainer.global_step == 5:
            self.average[1] = math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.clone(), "unknown": self.unknown.clone()}


def test_averages_of_weights_in_a_callback_are_looked_at(tmp_path: Path) -> None:
    checkpoint = train(tmp_path, Toy(), before=[Average()])
    directory = CheckpointDirectory(tmp_path / "version_0" / "checkpoints")
    assert directory.info([*checkpoint.kept][-1])["nonfinite"] == ["callbacks.Average.average"]
    assert checkpoint.last == "epoch=0-step=4"


class SpoilAverage(Callback):
    """Write a NaN into the average of the weights; of shards, on rank 1 only."""

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        (averaging,) = [one for one in trainer.callbacks if isinstance(one, WeightAveraging)]
        if trainer.global_step == 3 and (trainer.rank == 1 or trainer.strategy.name != "fsdp"):
            for average in averaging._averaged._averages.values():
                if average.numel():
                    average.view(-1)[0] = math.nan


class WithMask(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))


def test_averages_of_weights_are_looked_at_and_masks_are_no_mistake(tmp_path: Path) -> None:
    checkpoint = train(tmp_path, WithMask(), before=[SpoilAverage(), WeightAveraging()])
    directory = CheckpointDirectory(tmp_path / "version_0" / "checkpoints")
    assert directory.info([*checkpoint.kept][-1])["nonfinite"] == ["average.layer.weight", "average.layer.bias"]
    assert checkpoint.last == "epoch=0-step=2"
    finite = WithMask()
    train(tmp_path / "finite", finite, before=[WeightAveraging()])
    assert finite.get_buffer("mask").tolist() == [0.0, -math.inf]  # the average has taken the place of the weights
    assert steps_in(tmp_path / "finite")["-> last"] == 12


class GrowingMask(Toy):
    """A mask of which more and more is -inf, and then a part NaN."""

    def __init__(self, spoilt_at: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -math.inf]))
        self.spoilt_at = spoilt_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 2:
            self.get_buffer("mask")[1] = -math.inf
        if self.global_step + 1 == self.spoilt_at:
            self.get_buffer("mask")[0] = math.nan
        return super().training_step(batch, batch_idx)


def test_a_mask_may_grow_but_not_become_nan(tmp_path: Path) -> None:
    assert train(tmp_path / "grows", GrowingMask(99)).last == "epoch=1-step=12"
    assert train(tmp_path / "nan", GrowingMask(5)).last == "epoch=0-step=4"


class BadScore(Toy):
    """The validated value is a number that nothing beats, from step 6 on."""

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.score if self.global_step >= 6 else float(self.global_step))


@pytest.mark.parametrize(("mode", "score", "best"), [("min", -math.inf, 2), ("max", math.inf, 4), ("max", math.nan, 4)])
def test_a_score_that_is_not_finite_is_reported_and_never_the_best(
    mode: Any, score: float, best: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        train(tmp_path, BadScore(score), monitor="score", mode=mode)
    assert steps_in(tmp_path)["-> best"] == best
    assert caplog.text.count("not finite in the validation after step 6: score") == 1
    assert caplog.text.count("in the validation after") == 1


def test_nothing_else_is_found_when_only_checkpoints_that_are_not_finite_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, Spoilt(1))
    assert "-> last" not in steps_in(tmp_path)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trainer"):
        train(tmp_path, Spoilt(99), steps=14, ckpt_path="last")
    assert "The weights or optimizer states of epoch=1-step=12 are not finite, and there is no other" in caplog.text
    assert "weights that are not finite at the start of training: layer.weight, layer.bias" in caplog.text


def test_save_checkpoint_says_so_and_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Save(Callback):
        def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
            trainer.save_checkpoint(tmp_path / "mine")

    with caplog.at_level(logging.WARNING, "trainer"):
        trainer = quiet(max_steps=6, callbacks=[Save()], default_root_dir=tmp_path)
        trainer.fit(Spoilt(5), loader(8), loader(1))
    assert "step 6: the saved state is not finite (model.layer.weight, model.layer.bias)" in caplog.text
    assert "the loss of step 5 is nan on rank 0" in caplog.text
    assert CheckpointDirectory(tmp_path).info("mine")["nonfinite"] == ["model.layer.weight", "model.layer.bias"]


def test_sums_that_overflow_are_looked_at_again() -> None:
    large = {"a": torch.full((10,), 3e38), "b": torch.full((10,), 6e4, dtype=torch.float16), "c": torch.ones(2) * 1j}
    assert not_finite(floating_tensors(large, "large")) == []
    spoilt = {name: tensor.clone() for name, tensor in large.items()}
    for tensor in spoilt.values():
        tensor[1] = math.inf
    spoilt["d"] = torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)
    spoilt["e"] = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    assert not_finite(floating_tensors([spoilt, {"i": torch.ones(2, dtype=torch.int64)}], "s")) == [
        f"s.0.{name}" for name in "abcde"
    ]


def test_of_checkpoints_that_are_not_finite_only_the_newest_one_is_kept() -> None:
    rule = Retention(by_value=False, mode="min", top_k=1, last=True)
    assert rule.to_delete({}, ()) == rule.to_delete({"n": None}, ["n"]) == []
    assert rule.to_delete({"a": None, "n": None, "m": None}, ["n", "m"]) == ["n"]
    assert rule.to_delete({"a": None, "n": None, "b": None}, ["n"]) == ["a", "n"]
    by_value = Retention(by_value=True, mode="min", top_k=1, last=False)
    assert by_value.to_delete({"a": 1.0, "b": 2.0, "n": 0.0}, ["n"]) == []
    assert by_value.best({"a": 1.0, "n": 0.0}, ["n"]) == ["a"]


# -- several processes -------------------------------------------------------------------------------------------------

NAMES = ("DDP x2", "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2")


class SpoilRankOne(Callback):
    """Write an infinity into rank 1's part of an optimizer's state, or into all of it where the ranks have the same."""

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == 3 and (trainer.rank == 1 or not trainer.strategy.shards_state):
            averages = [s["exp_avg"] for s in trainer.optimizers[0].state.values() if "exp_avg" in s]
            for average in averages:
                own = getattr(average, "_local_tensor", average).view(-1)
                if own.numel():
                    own[0] = math.inf


class WithAdam(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train_on_two(name: str, folder: str) -> dict[str, Any]:
    found = {}
    for kind in ("sync", "async", "average"):
        checkpoint = ModelCheckpoint(
            every_n_train_steps=1, async_save=kind == "async", dirpath=f"{folder}/{name}{kind}"
        )
        spoiling = [SpoilAverage(), WeightAveraging()] if kind == "average" else [SpoilRankOne()]
        trainer = WAYS[name].trainer(seed=1, max_steps=5, callbacks=[*spoiling, checkpoint], enable_checkpointing=True)
        trainer.fit(WithAdam(), DataLoader(MLP.data(64), 4))
        found[kind] = (list(checkpoint.kept), checkpoint.nonfinite, checkpoint.last)
    return found


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names = [name for name in selected(request, "name") if name in NAMES]
        return run_each(train_on_two, names, str(folder))


@pytest.mark.parametrize("name", NAMES)
def test_the_processes_agree_on_what_one_of_them_owns(name: str, on_two: dict[str, list[Any]]) -> None:
    skip_if_missing(name)
    expected = (["epoch=0-step=2", "epoch=0-step=5"], ["epoch=0-step=5"], "epoch=0-step=2")
    for rank in on_two[name]:
        assert rank == {"sync": expected, "async": expected, "average": expected}


# -- losses, scales and rates ------------------------------------------------------------------------------------------


class Masked(TrainModule):
    """Classes of which some are ignored; all of them in the batches of the masked ones."""

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.counts = counts

    def num_items(self, batch: Any) -> Any:
        items = (batch[1] >= 0).sum()
        return {"number": int(items), "tensor": items, "unknown": None}[self.counts]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1], ignore_index=-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("counts", ["number", "tensor", "unknown"])
def test_a_batch_without_items_has_no_loss_to_report(
    counts: str, window: int, caplog: pytest.LogCaptureFixture
) -> None:
    targets = torch.arange(32) % 3
    targets[8:12] = targets[16:20] = -1
    data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), targets)
    module = Masked(counts)
    with caplog.at_level(logging.WARNING, "trainer"):
        quiet(max_epochs=2, accumulate_grad_batches=window).fit(module, DataLoader(data, 4))
    assert torch.isfinite(module.layer.weight).all()
    messages = [record.message for record in caplog.records if record.message.startswith("the loss of step")]
    assert len(messages) == (1 if counts == "unknown" else 0)
    assert all("define num_items" in one for one in messages)


class MaskedMean(Masked):
    """A mean as users write it, which is 0 / 0 for a batch without items, beside a second term."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mask = (batch[1] >= 0).float()
        losses = nn.functional.cross_entropy(self.layer(batch[0]), batch[1].clamp(min=0), reduction="none")
        penalty = (self.layer(batch[0]).square().sum(1) * mask).sum() / mask.sum()
        return (losses * mask).sum() / mask.sum() + 0.1 * penalty

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.LBFGS(self.parameters(), max_iter=2)
            if self.counts == "closure"
            else super().configure_optimizers()
        )

    def num_items(self, batch: Any) -> int:
        return int((batch[1] >= 0).sum())


def masked_data() -> TensorDataset:
    """Return 32 samples; the third, the fifth and the last two batches of 4 have no items."""
    targets = torch.arange(32) % 3
    targets[8:12] = targets[16:20] = targets[24:32] = -1
    return TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), targets)


def train_masked(way: str) -> list[torch.Tensor]:
    torch.manual_seed(2)
    module, two = MaskedMean(way), way in ("ddp", "fsdp")
    options = {"strategy": way, "devices": 2} if two else {}
    guards = [BadStepGuard("skip")] if way == "guard" else []
    trainer = quiet(max_epochs=2, accumulate_grad_batches=2, callbacks=guards, **options)
    trainer.fit(module, DataLoader(masked_data(), 2 if two else 4))
    return [*trainer.full_state_dict(everywhere=True).values()]


@pytest.mark.parametrize("way", ["automatic", "closure", "guard", "ddp", "fsdp"])
def test_a_mean_over_no_items_leaves_the_weights_alone(way: str) -> None:
    """The weights equal those of a loop by hand over the samples that have items."""
    trained = run_distributed(train_masked, 2, way)[0] if way in ("ddp", "fsdp") else train_masked(way)
    torch.manual_seed(2)
    module = MaskedMean(way)
    optimizer, (features, targets) = module.configure_optimizers(), masked_data().tensors
    for first in (0, 8, 16) * 2:

        def closure(first: int = first) -> torch.Tensor:
            optimizer.zero_grad()
            has_items = targets[first : first + 8] >= 0
            batch = features[first : first + 8][has_items], targets[first : first + 8][has_items]
            loss = module.training_step(batch, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
    for one, by_hand in zip(trained, module.parameters(), strict=True):
        assert torch.allclose(one, by_hand, atol=1e-6)


class Overflows(Toy):
    """All gradients are infinite up to a step."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.until = until

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.layer.weight.register_hook(self._spoil) if self.global_step == 0 else None
        return loss

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf if self.global_step < self.until else gradient


def test_a_loss_scale_that_collapses_is_reported_and_then_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        quiet(max_steps=25, precision="16-mixed", log_every_n_steps=5).fit(Overflows(14), loader(32))
        assert "loss scale" not in caplog.text  # a few overflows are the rule
        module = Overflows(30)
        quiet(max_steps=40, precision="16-mixed", log_every_n_steps=5).fit(module, loader(48))
    assert caplog.text.count("the loss scale of '16-mixed' has fallen to 0.0625 by step 20") == 1
    assert torch.isfinite(module.layer.weight).all()
    with raises_recorded(ConfigError):
        quiet(max_steps=400, precision="16-mixed").fit(Overflows(1000), loader(200))


def test_a_schedule_that_ends_in_nan_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Schedule(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.nan if step > 3 else 1.0)
            return [optimizer], [{"scheduler": rate, "interval": "step"}]

    with caplog.at_level(logging.WARNING, "trainer"):
        quiet(max_steps=12, log_every_n_steps=2).fit(Schedule(), loader(16))
    assert caplog.text.count("the learning rate is nan at step 4") == 1


@pytest.mark.parametrize("every", [1, 50])
def test_a_loss_in_which_no_parameter_takes_part_is_reported(every: int, caplog: pytest.LogCaptureFixture) -> None:
    class Lone(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.ones(3, requires_grad=True).sum()

    with caplog.at_level(logging.WARNING, "trainer"):
        quiet(max_epochs=1, log_every_n_steps=every).fit(Lone(), loader(4))
        quiet(max_epochs=1, log_every_n_steps=every).fit(Toy(), loader(4))
    assert caplog.text.count("no parameter of the optimizers has a gradient: the loss depends on none of them") == 1


def _warned_under_zero3() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer").addHandler(handler)
    WAYS["ZeRO-3 x2"].trainer(max_epochs=1).fit(MLP(), DataLoader(MLP.data(16), 4))
    return messages


def test_flat_parameters_of_deepspeed_are_no_missing_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_if_missing("ZeRO-3 x2")
    monkeypatch.chdir(tmp_path)
    for messages in run_distributed(_warned_under_zero3):
        assert not [one for one in messages if "has a gradient" in one]


def test_a_complex_value_is_not_logged() -> None:
    class Complex(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("wave", loss.detach() * 1j)
            return loss

    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(Complex(), loader(2))
