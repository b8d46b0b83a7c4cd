"""SimpleProfiler measures each part by a fake clock, the parts add up, and its listeners are removed."""

from __future__ import annotations

import pstats
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.callbacks import AdvancedProfiler, ModelCheckpoint, Profiler, SimpleProfiler
from trainer.callbacks.profiler import LOOP
from trainer.loop.callback_list import CallbackList
from trainer.metrics.phases import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    EVALUATION_DATA,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    TRANSFER,
    each_wait,
    unheard,
)


class Clock:
    """A clock that advances only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowData:
    """Data whose batches take 10 s each."""

    def __init__(self, clock: Clock, batches: int, seconds: float = 10.0) -> None:
        self.clock, self.batches, self.seconds = clock, batches, seconds

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        for batch in loader(self.batches):
            self.clock.now += self.seconds
            yield batch


class Backwards(torch.autograd.Function):
    """The identity, with a backward that takes 3 s."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.clock.now += 3
        return gradients[0], None


class Slow(Toy):
    """A module with 2 s forward, 3 s backward, 4 s optimizer, 5 s validation, 6 s in a hook, 7 s transfer."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.__dict__["clock"] = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 2
        return Backwards.apply(self._loss(batch), self.clock)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 5

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 6

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.clock.now += 7
        return batch

    def configure_optimizers(self) -> Any:
        clock = self.clock

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                clock.now += 4
                return super().step(closure)

        return SGD(self.parameters(), lr=0.1)


class Pause(Callback):
    """A callback that takes 8 s at the end of each step, and 9 s for its state in a checkpoint."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.clock.now += 8

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        self.clock.now += 9


def test_each_part_gets_its_own_time_and_they_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    profiler = SimpleProfiler(clock=clock)
    callbacks = [Pause(clock), ModelCheckpoint(every_n_epochs=1)]
    trainer = quiet(
        max_epochs=1, accumulate_grad_batches=2, profiler=profiler, callbacks=callbacks, enable_checkpointing=True
    )
    trainer.fit(Slow(clock), SlowData(clock, 4), SlowData(clock, 2, seconds=1.0))
    assert {part: seconds for part, seconds in profiler.seconds.items() if seconds} == {
        DATA: 4 * 10,
        TRANSFER: 4 * 7,
        FORWARD: 4 * 2,
        BACKWARD: 4 * 3,
        OPTIMIZER: 2 * 4,
        EVALUATION: 2 * 5,
        EVALUATION_DATA: 2 * 1,
        "module.on_train_batch_start": 4 * 6,
        "Pause.on_train_step_end": 2 * 8,
        "Pause.on_save_checkpoint": 2 * 9,  # with the rehearsal
    }
    assert sum(profiler.seconds.values()) == clock.now - 100
    assert (profiler.calls[FORWARD], profiler.calls[BACKWARD], profiler.calls[OPTIMIZER]) == (4, 4, 2)
    assert profiler.calls[CHECKPOINT] == 1
    assert {LOOP, LOGGING} <= profiler.seconds.keys()
    printed = capsys.readouterr().out
    assert re.search(r"^data wait +\d+ +40\.000 +\d+\.\d+ +24\.1%$", printed, flags=re.MULTILINE)
    assert re.search(r"^total +166\.000$", printed, flags=re.MULTILINE)


def test_the_real_clock_adds_up() -> None:
    profiler = SimpleProfiler()
    quiet(max_epochs=2, profiler=profiler).fit(Toy(), loader(5), loader(2))
    assert all(seconds >= 0 for seconds in profiler.seconds.values())
    assert profiler.calls[FORWARD] == 10
    assert profiler.seconds[FORWARD] > 0


def test_manual_optimization() -> None:
    class Manual(Slow):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    clock = Clock()
    profiler = SimpleProfiler(clock=clock)
    quiet(max_epochs=1, profiler=profiler).fit(Manual(clock), loader(3))
    assert [profiler.seconds[part] for part in (FORWARD, BACKWARD, OPTIMIZER)] == [3 * 2, 3 * 3, 3 * 4]


# -- the hint ----------------------------------------------------------------------------------------------------------


class SlowSamples(Dataset[Any]):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.clock.now += 1
        return torch.ones(4), torch.ones(1)


def profiled_on(data: Any, clock: Clock) -> None:
    quiet(max_epochs=1, profiler=SimpleProfiler(clock=clock)).fit(Slow(clock), data)


def test_slow_loading_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    profiled_on(DataLoader(SlowSamples(clock), batch_size=8), clock)  # 8 s of 30 s for each batch
    printed = capsys.readouterr().out
    assert "27% of the time went into waiting for training data" in printed
    assert "num_workers=0" in printed
    assert "persistent_workers=True" in printed


def test_slow_iterables_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    profiled_on(SlowData(clock, 3, seconds=78.0), clock)
    printed = capsys.readouterr().out
    assert "78% of the time went into waiting for training data. The data come from your own iterable" in printed


def test_no_hint_without_reason(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    profiled_on(SlowData(clock, 3, seconds=5.0), clock)  # 5 s of 27 s: less than a fifth
    printed = capsys.readouterr().out
    assert "data wait" in printed
    assert "waiting for training data" not in printed


# -- by name, and what is left -----------------------------------------------------------------------------------------


def test_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_epochs=1, profiler="simple").fit(Toy(), loader(2))
    assert "part of fit" in capsys.readouterr().out


def test_a_run_without_a_listener_notifies_nobody() -> None:
    """All phases share one empty context, hooks are called directly, and batches are not wrapped."""
    seen: list[Any] = []

    class Look(Callback):
        def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
            seen.append(trainer.run.phase)

    look = Look()
    quiet(max_epochs=1, callbacks=[look]).fit(Toy(), loader(2))
    assert seen == [unheard]
    assert unheard(FORWARD) is unheard(BACKWARD)
    assert CallbackList([look]).on_fit_start.func == look.on_fit_start
    batches = iter([1, 2])
    assert each_wait(unheard, DATA, batches) is batches


def test_a_phase_listener_is_notified_of_phases_that_end_with_an_error() -> None:
    class Listener(Callback):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def begin_phase(self, name: str) -> None:
            self.heard.append(f"begin {name}")

        def end_phase(self, name: str) -> None:
            self.heard.append(f"end {name}")

    class Fails(Toy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("on purpose")

    listener = Listener()
    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(max_epochs=1, callbacks=[listener]).fit(Fails(), loader(2))
    assert listener.heard == [
        f"{edge} {phase}" for phase in (DATA, TRANSFER, "module.on_train_batch_start") for edge in ("begin", "end")
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_each_run_has_its_table(capsys: pytest.CaptureFixture[str], fails: bool) -> None:
    class Fails(Toy):
        def on_train_epoch_end(self) -> None:
            if fails:
                raise RuntimeError("on purpose")

    profiler = SimpleProfiler()
    trainer, module = quiet(max_epochs=1, profiler=profiler), Fails()
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(module, loader(2), loader(1))
    else:
        trainer.fit(module, loader(2), loader(1))
    assert capsys.readouterr().out.count("part of fit") == 1
    trainer.validate(module, loader(3))
    assert profiler.calls[EVALUATION] == 3
    assert FORWARD not in profiler.calls
    printed = capsys.readouterr().out
    assert printed.count("part of validate") == 1
    assert "part of fit" not in printed


def test_profiling_changes_no_number() -> None:
    plain, profiled = Toy(), Toy()
    profiled.load_state_dict(plain.state_dict())
    quiet(max_epochs=2).fit(plain, loader(6, shuffle=True), loader(2))
    quiet(max_epochs=2, profiler=SimpleProfiler(synchronize=True)).fit(profiled, loader(6, shuffle=True), loader(2))
    assert torch.equal(plain.layer.weight, profiled.layer.weight)


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
def test_names_of_files(kind: Any, tmp_path: Path) -> None:
    with raises_recorded(ConfigError):
        kind(dirpath=tmp_path, filename="a\0b")
    trainer = quiet(max_steps=1, callbacks=[kind(dirpath=tmp_path / "a", filename="b/c")])
    trainer.fit(Toy(), loader())
    trainer.validate(Toy(), loader())
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"fit-b_c.txt", "validate-b_c.txt"}
    assert (tmp_path / "a" / "fit-b_c.txt").read_text()


def test_a_file_without_a_folder_is_with_the_logs(tmp_path: Path) -> None:
    trainer = quiet(max_steps=1, profiler=SimpleProfiler(filename="times"), default_root_dir=tmp_path)
    trainer.fit(Toy(), loader())
    assert "part of fit" in (Path(trainer.log_dir) / "fit-times.txt").read_text()


def profiled_in_each_process(folder: str) -> None:
    profiler = SimpleProfiler(dirpath=folder, filename="times")
    quiet(max_steps=1, strategy="ddp", devices=2, profiler=profiler).fit(Toy(), loader())


def test_each_process_has_its_file(tmp_path: Path) -> None:
    run_distributed(profiled_in_each_process, 2, str(tmp_path / "times"))
    assert {path.name for path in (tmp_path / "times").iterdir()} == {"fit-times-0.txt", "fit-times-1.txt"}


# -- actions of your own, and profilers of your own --------------------------------------------------------------------


def test_own_actions_without_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    profiler = SimpleProfiler(clock=clock)
    for seconds in (3, 1):
        clock.now += 50  # in none
        with profiler.profile("load"):
            clock.now += seconds
            with profiler.profile("decode"):
                clock.now += 2
    assert profiler.recorded_durations == {"load": [5, 3], "decode": [2, 2]}
    assert profiler.seconds == {"load": 4, "decode": 4}
    profiler.describe()
    assert re.search(r"^load +2 +4\.000 +2000\.000 +50\.0%$", capsys.readouterr().out, flags=re.MULTILINE)
    with raises_recorded(ConfigError):
        profiler.stop("load")
    profiler.start("load")
    with raises_recorded(ConfigError):
        profiler.start("load")


def test_own_actions_in_a_run() -> None:
    clock = Clock()
    profiler = SimpleProfiler(clock=clock)

    class Measured(Slow):
        def on_train_epoch_start(self) -> None:
            with self.trainer.profiler.profile(BACKWARD):  # a name that a phase has, too
                clock.now += 1.5

    trainer = quiet(max_epochs=2, profiler=profiler)
    with profiler.profile("all of it"):
        trainer.fit(Measured(clock), loader(2))
    assert profiler.recorded_durations[BACKWARD] == [1.5, 1.5]
    assert profiler.seconds[BACKWARD] == 3 + 4 * 3
    assert profiler.recorded_durations["all of it"] == [sum(profiler.seconds.values())]


class Counts(Profiler):
    """A profiler as one writes it for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.open: list[str] = []

    def start(self, action_name: str) -> None:
        self.started.append(action_name)
        self.open.append(action_name)

    def stop(self, action_name: str) -> None:
        assert self.open.pop() == action_name

    def summary(self) -> str:
        return f"{self.started.count(FORWARD)} forwards, {self.started.count('mine')} of mine"


def test_a_profiler_of_your_own_gets_all_phases(capsys: pytest.CaptureFixture[str]) -> None:
    class Measured(Toy):
        def on_train_start(self) -> None:
            with self.trainer.profiler.profile("mine"):
                pass

    profiler = Counts()
    quiet(max_epochs=1, profiler=profiler).fit(Measured(), loader(3))
    assert {DATA, FORWARD, BACKWARD, OPTIMIZER} <= {*profiler.started}
    assert capsys.readouterr().out.count("3 forwards, 1 of mine\n") == 1


def test_functions_of_own_actions(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(dirpath=tmp_path / "out", dump_stats=True)
    with profiler.profile("sort/it"), profiler.profile("inner"):
        sorted([3, 1])
    profiler.describe()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"profile.txt", "sort_it.prof", "inner.prof"}
    assert "sorted" in (tmp_path / "out" / "profile.txt").read_text()
    assert any("sorted" in str(name) for name in vars(pstats.Stats(str(tmp_path / "out" / "inner.prof")))["stats"])
    with raises_recorded(ConfigError):
        profiler.stop("inner")
