"""The tuner finds what there is to find, and leaves everything as it was."""

from __future__ import annotations

import copy
import itertools
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, DataModule, Tuner
from trainer.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint
from trainer.model.memory_limit import is_out_of_memory, limited_memory
from trainer.tuner.batch_size import BatchSizes, Stopwatch, search
from trainer.tuner.throughput import Setting, fused, search_settings, settings_to_try, with_options
from trainer.tuner.trial import run_trial


class Tuned(Toy):
    def __init__(self, lr: float = 0.5, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.drop = torch.nn.Dropout(0.5)
        self.norm = torch.nn.BatchNorm1d(4)

    def _loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(self.drop(self.norm(batch[0]))), batch[1])

    def train_dataloader(self) -> Any:
        return loader(64, self.hparams.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def everything(trainer: Any, module: Any, *generators: torch.Generator) -> Any:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    progress = (trainer.global_step, trainer.current_epoch, trainer.has_fit, dict(trainer.callback_metrics))
    return state, torch.get_rng_state(), progress, [one.get_state() for one in generators], sorted(Path().rglob("*"))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class NeverCalled(Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        pytest.fail("a callback of the user was called")


@pytest.mark.parametrize("what", ["lr_find", "scale_batch_size"])
@pytest.mark.parametrize("trained", [False, True], ids=["new", "after a fit"])
def test_every_bit_is_as_before(what: str, trained: bool) -> None:
    trainer = quiet(max_epochs=1, enable_checkpointing=True, callbacks=[ModelCheckpoint()], logger=CSVLogger())
    module, generator = Tuned(), torch.Generator().manual_seed(5)
    if trained:
        trainer.fit(module, loader(4), loader(1))
        trainer.settings.callbacks.clear()
    data = DataLoader(loader(16).dataset, 4, shuffle=True, generator=generator)
    before = everything(trainer, module, generator)
    kept = copy.deepcopy(trainer.checkpoint_callback.state_dict()) if trained else None
    getattr(Tuner(trainer), what)(module, data, **({"max_val": 8} if what == "scale_batch_size" else {}))
    assert same(everything(trainer, module, generator), before)
    assert not trained or trainer.checkpoint_callback.state_dict() == kept


def test_a_learning_rate_is_found_and_set() -> None:
    module = Tuned()
    trainer = quiet(max_epochs=3, callbacks=[NeverCalled(), EarlyStopping("nothing")])
    finder = Tuner(trainer).lr_find(module, num_training=60)
    rates = finder.results["lr"]
    assert rates[0] == 1e-8
    assert all(b / a == pytest.approx(1e8 ** (1 / 59)) for a, b in itertools.pairwise(rates))
    assert len(rates) == len(finder.results["loss"]) <= 60
    assert module.lr == module.hparams.lr == finder.suggestion()
    assert 1e-8 < module.lr <= 1


def test_the_learning_rate_is_that_of_each_step_and_the_search_ends_when_the_loss_explodes() -> None:
    seen: list[float] = []

    class Sees(Toy):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    finder = Tuner(quiet()).lr_find(Sees(), loader(4), min_lr=1.0, max_lr=100.0, num_training=50, mode="linear")
    rates = finder.results["lr"]
    assert len(rates) < 50
    assert seen[:50] == [0.0] * 50
    assert rates == pytest.approx(seen[50 : 50 + len(rates)])
    assert all(map(math.isfinite, finder.results["loss"]))
    assert finder.suggestion() is None
    assert finder.stopped.startswith("no descent seen: at no learning rate from 1 to 100 the loss falls")


@pytest.mark.parametrize("first", [1, 4])
def test_a_loss_that_is_not_finite_at_any_rate_is_reported(first: int, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            broken = self.trainer.global_step + 1 >= first
            return super().training_step(batch, batch_idx) * (math.nan if broken else 1.0)

    finder = Tuner(quiet()).lr_find(Breaks(), loader(4), num_training=8)
    assert finder.suggestion() is None
    assert f"no descent seen: the loss of step {first} is nan" in caplog.text


def test_unequal_losses_of_the_first_steps_do_not_end_the_search() -> None:
    class Uneven(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (1e-3 if self.trainer.global_step == 0 else 1.0)

    finder = Tuner(quiet()).lr_find(Uneven(), loader(4), num_training=60)
    assert finder.suggestion() is not None
    assert len(finder.results["lr"]) == 60


@pytest.mark.parametrize("skips", [lambda number: number % 7 == 3, lambda number: True], ids=["some", "all"])
def test_batches_that_the_module_skips(skips: Any) -> None:
    class Skips(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if skips(batch_idx) else super().training_step(batch, batch_idx)

    finder = Tuner(quiet()).lr_find(Skips(), loader(20), num_training=40)
    if skips(0):
        assert finder.suggestion() is None
        assert "None: all steps skip their batches" in finder.stopped
    else:
        assert 0.01 < (finder.suggestion() or 0) < 1


def test_a_picture() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    finder = Tuner(quiet()).lr_find(Toy(), loader(4), num_training=30)
    figure = finder.plot(suggest=True)
    figure.savefig("lr.png")
    assert Path("lr.png").read_bytes().startswith(b"\x89PNG")
    from matplotlib import pyplot

    pyplot.close("all")


class Wide(Toy):
    """A module that takes 4 MB for each sample."""

    def _loss(self, batch: Any) -> torch.Tensor:
        many = batch[0].repeat(1, 2**18)
        return super()._loss(batch) + 0 * many.mean()


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_largest_batch_that_fits_into_a_limit(mode: Any) -> None:
    tuner = Tuner(quiet())
    size = tuner.scale_batch_size(Wide(), loader(512, 4), mode=mode, memory_limit=150 * 2**20, margin=0.0)
    found = tuner.batch_sizes
    assert found is not None
    assert size == max(found.throughput) < min(found.too_large)
    assert (min(found.too_large) == 2 * size) if mode == "power" else (min(found.too_large) == size + 1)
    assert found.worthwhile in found.throughput


def test_a_limit_of_the_user_is_heeded() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    tuner = Tuner(quiet())
    with limited_memory(150 * 2**20):
        size = tuner.scale_batch_size(Wide(), loader(512, 4))
    assert tuner.batch_sizes is not None
    assert size == max(tuner.batch_sizes.throughput) < min(tuner.batch_sizes.too_large)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


class Data(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 3

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), self.batch_size)


def test_the_attribute_is_set_and_there_are_no_more_than_all_samples() -> None:
    data = Data()
    tuner = Tuner(quiet())
    assert tuner.scale_batch_size(Toy(), datamodule=data) == data.batch_size == 32
    assert tuner.batch_sizes is not None
    assert list(tuner.batch_sizes.throughput) == [2, 4, 8, 16, 32]


class Broken(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("mine")


def test_another_error_is_raised_and_the_attribute_is_as_before() -> None:
    data = Data()
    with pytest.raises(ValueError, match="mine"):
        Tuner(quiet()).scale_batch_size(Broken(), datamodule=data)
    assert data.batch_size == 3


def test_what_says_that_the_memory_is_used_up() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    explained = ConfigError("words")
    explained.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(explained)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2"))


def test_the_search() -> None:
    def attempt(size: int) -> float:
        if size > 45:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {1: 10.0, 2: 20.0, 4: 40.0, 8: 70.0}.get(size, 71.0)

    def tried(mode: str, first: int = 2) -> BatchSizes:
        return search(attempt, mode, first, max_trials=25, max_val=8192, margin=0.05)

    assert (tried("power").chosen, tried("power").worthwhile) == (32, 8)
    assert max(tried("binsearch").throughput) == 45
    assert tried("binsearch").chosen == 42
    assert tried("power", first=512).chosen == 32
    assert search(attempt, "power", 2, max_trials=2, max_val=8192, margin=0).chosen == 4
    assert search(attempt, "power", 2, max_trials=25, max_val=20, margin=0).chosen == 20


WRONG: dict[str, Any] = {
    "range": lambda: Tuner(quiet()).lr_find(Toy(), min_lr=1, max_lr=0.1),
    "steps": lambda: Tuner(quiet()).lr_find(Toy(), num_training=1),
    "mode": lambda: Tuner(quiet()).lr_find(Toy(), mode="log"),  # type: ignore[arg-type]
    "attribute": lambda: Tuner(quiet()).lr_find(Tuned(), attr_name="learnrate"),
    "method": lambda: Tuner(quiet()).lr_find(Toy(), method="test"),  # type: ignore[arg-type]
    "size": lambda: Tuner(quiet()).scale_batch_size(Toy()),
    "search": lambda: Tuner(quiet()).scale_batch_size(Toy(), mode="bin"),  # type: ignore[arg-type]
    "loader": lambda: Tuner(quiet()).scale_batch_size(Toy(), [1]),
    "shards": lambda: Tuner(quiet(devices=2, strategy="fsdp")).scale_batch_size(Toy(), loader(2)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    with raises_recorded(ConfigError):
        WRONG[case]()


def sharded(strategy: str) -> Any:
    module = Tuned()
    before = copy.deepcopy(module.state_dict())
    trainer = quiet(devices=2, strategy=strategy, max_steps=2)
    finder = Tuner(trainer).lr_find(module, loader(8), num_training=20, early_stop_threshold=None)
    assert same(module.state_dict(), before)
    trainer.fit(module, loader(8))
    return finder.results["loss"], trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_2"])
def test_two_processes_find_the_same_curve_and_train_afterwards(strategy: str) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    one, other = run_distributed(sharded, 2, strategy)
    assert one == other
    assert one[1] == 2
    assert len(one[0]) == 20


def little_memory_on_rank_1() -> Any:
    """Search where only the second process has little memory."""
    limit = 150 * 2**20 if os.environ["RANK"] == "1" else None
    module, data = Wide(), loader(256, 4)
    before = copy.deepcopy(module.state_dict())
    trainer = quiet(devices=2, strategy="ddp", max_steps=2)
    tuner = Tuner(trainer)
    size = tuner.scale_batch_size(module, data, mode="binsearch", memory_limit=limit, margin=0.0, init_val=4)
    assert same(module.state_dict(), before)
    trainer.fit(module, data)
    assert tuner.batch_sizes is not None
    return size, tuner.batch_sizes.throughput, tuner.batch_sizes.too_large, trainer.global_step


def test_two_processes_agree_on_a_batch_size_that_fits_on_both() -> None:
    one, other = run_distributed(little_memory_on_rank_1)
    assert one == other
    size, throughput, too_large, steps = one
    assert size == max(throughput) < min(too_large)
    assert 4 <= size < 64  # 64 samples take 256 MB
    assert steps == 2


def test_faster_settings_are_found_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Tuned):
        """Slow by the step, so that larger batches pay on any machine."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    larger, with_fused = Setting("batch_size x 4", loader={"batch_size": 4}), Setting("fused", fused=True)
    wrong = Setting("precision", arguments={"precision": "fp3"})
    monkeypatch.setattr(
        "trainer.tuner.tuner.settings_to_try", lambda present, device_type: iter([larger, with_fused, wrong])
    )
    module, trainer = Slow(), quiet(max_epochs=1)
    before = everything(trainer, module)
    found = Tuner(trainer).throughput(module, steps_per_trial=4)
    assert same(everything(trainer, module), before)
    assert larger in found.pays
    assert list(found.found)[:2] == [larger, with_fused]  # and both together, if both pay
    assert list(found.failed) == [wrong]
    assert all(one.name in found.table() for one in (larger, with_fused, wrong))
    with raises_recorded(ConfigError):
        Tuner(trainer).throughput(module, steps_per_trial=1)
    names = [one.name for one in settings_to_try(quiet(compile=True).settings, "cpu")]
    assert "num_workers=0" in names
    assert "compile=True" not in names


def test_settings_that_train_alone_may_not_train_together() -> None:
    def attempt(setting: Setting) -> float:
        if setting.loader and setting.fused:
            raise ConfigError("a stream that worker processes begin anew has no batch")
        return 20.0 if setting.loader or setting.fused else 10.0

    settings = [Setting("num_workers=2", loader={"num_workers": 2}), Setting("fused", fused=True)]
    found = search_settings(attempt, iter(settings), combine=True)
    assert found.pays == settings
    assert "has no batch" in found.table()


def test_steps_that_compile_are_not_measured() -> None:
    class Compiles(Toy):
        """Has a graph more in its third step."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            torch._dynamo.utils.counters["stats"]["unique_graphs"] += batch_idx == 2
            return super().training_step(batch, batch_idx)

    watch, module = Stopwatch(), Compiles()
    run_trial(quiet().settings, module, loader(40), None, watch, 5)
    assert watch.samples == 3 * 4


def test_a_loader_and_an_optimizer_with_other_options() -> None:
    plain = DataLoader(TensorDataset(torch.ones(12, 1)), 3, num_workers=2, persistent_workers=True)
    other = with_options(plain, {"num_workers": 0, "batch_size": 2})
    assert (other.batch_size, other.num_workers, other.persistent_workers) == (6, 0, False)
    assert plain.batch_size == 3
    with raises_recorded(ConfigError):
        with_options(plain, {"num_workers": 2, "persistent_workers": True})
    own = DataLoader(TensorDataset(torch.ones(4, 1)), batch_sampler=[[0, 1], [2, 3]])
    assert with_options(own, {"num_workers": 1}).batch_sampler is own.batch_sampler
    with raises_recorded(ConfigError):
        with_options(own, {"batch_size": 2})
    with raises_recorded(ConfigError):
        fused(torch.optim.LBFGS([torch.ones(1, requires_grad=True)]))
    optimizer = torch.optim.AdamW([torch.ones(1, requires_grad=True)])
    assert fused(optimizer).param_groups[0]["fused"]
