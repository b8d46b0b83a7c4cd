"""What no checkpoint can hold is found before the first step; what comes later is left out, and the rest is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.compare import assert_same_bits
from tests.helpers.processes import fork_python
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, DataModule
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.left_out import LeftOutError
from trainer.checkpoint.manifest import read_manifest
from trainer.errors import CheckpointError

GOOD, BAD = [1, 2], {1, object}


class Extra(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = GOOD

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Keeps(Callback):
    """Keeps a value in its state, and one in an entry of its own."""

    def __init__(self) -> None:
        self.kept: Any = GOOD
        self.saved: Any = GOOD

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["saved"] = self.saved


class Data(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = GOOD

    def train_dataloader(self) -> Any:
        return loader(2)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


class Net(Toy):
    """Has parts whose values `spoil` replaces by what no checkpoint can hold, before a step."""

    def __init__(self, spoiled: tuple[str, ...] = (), before_step: int = 0) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.extra, self.callback, self.data = Extra(), Keeps(), Data()
        self.spoiled, self.before_step, self.steps = spoiled, before_step, list[int]()

    def configure_callbacks(self) -> Any:
        return [self.callback]

    def on_train_start(self) -> None:
        self.spoil()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps.append(self.global_step)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.spoil()

    def spoil(self) -> None:
        if self.global_step != self.before_step:
            return
        optimizer, scheduler = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        places = {
            "extra": (vars(self.extra), "kept"),
            "callback": (vars(self.callback), "kept"),
            "hook": (vars(self.callback), "saved"),
            "data": (vars(self.data), "kept"),
            "optimizer": (optimizer.param_groups[0], "kept"),
            "scheduler": (vars(scheduler), "kept"),
        }
        for name in self.spoiled:
            owner, key = places[name]
            owner[key] = BAD

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


ALL = ("extra", "callback", "hook", "data", "optimizer", "scheduler")


def fit(module: Net, folder: Path, epochs: int = 1, ckpt_path: Any = None, **options: Any) -> Any:
    checkpoint = ModelCheckpoint(folder, filename="{step}", **options)
    trainer = quiet(max_epochs=epochs, enable_checkpointing=True, default_root_dir=folder, callbacks=[checkpoint])
    trainer.fit(module, datamodule=module.data, ckpt_path=ckpt_path)
    return trainer


# -- before the first step ---------------------------------------------------------------------------------------------


def test_everything_that_cannot_be_stored_is_named_at_once_before_the_first_step(tmp_path: Path) -> None:
    fit(Net(), tmp_path)
    for step, ckpt_path in ((0, None), (2, "last")):
        module = Net(ALL, before_step=step)
        with raises_recorded(CheckpointError):
            fit(module, tmp_path, 2, ckpt_path)
        assert module.steps == []


class Late(Callback):
    """Stores what the validation makes."""

    value: Any = None
    failed = 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.value = 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value + 1}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        Late.failed += self.value is None
        checkpoint["late"] = self.value * 2


def test_a_hook_that_needs_what_comes_later_ends_nothing_and_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Late.failed = 0
    trainer = quiet(max_epochs=1, enable_checkpointing=True, callbacks=[Late(), ModelCheckpoint(tmp_path)])
    with caplog.at_level("INFO", "trainer"):
        trainer.fit(Toy(), loader(2), loader(1))
    checkpoint = read_checkpoint(tmp_path / "epoch=0-step=2")
    assert (checkpoint["added"], checkpoint["callbacks"]["Late"]) == ({"late": 1.0}, {"value": 1.5})
    assert Late.failed == 1
    assert "state_dict of Late (TypeError" in caplog.text
    assert "on_save_checkpoint of Late (TypeError" in caplog.text
    module = Net(("hook",))
    trainer = quiet(max_epochs=1, enable_checkpointing=True, callbacks=[Late(), ModelCheckpoint()])
    with raises_recorded(CheckpointError):
        trainer.fit(module, datamodule=module.data)


class Draws(Toy):
    """Draws numbers, and counts, in its hook."""

    def __init__(self, hooked: bool = True) -> None:
        super().__init__()
        self.drop, self.count, self.hooked, self.counts = nn.Dropout(0.5), 0, hooked, list[int]()

    def _loss(self, batch: Any) -> torch.Tensor:
        return super()._loss([self.drop(batch[0]), batch[1]])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.hooked:
            torch.rand(3), np.random.rand(3)
            self.count += 1
            self.counts.append(self.global_step)
            del checkpoint["state_dict"]["layer.bias"], checkpoint["hyper_parameters"]


def test_it_leaves_no_trace(tmp_path: Path) -> None:
    ends = []
    for hooked in (True, False):
        torch.manual_seed(0)
        module = Draws(hooked)
        checkpoint = ModelCheckpoint(tmp_path / str(hooked), every_n_epochs=2)
        quiet(max_epochs=2, enable_checkpointing=True, callbacks=[checkpoint]).fit(module, loader(2))
        ends.append(module.state_dict())
        assert (module.count, module.counts) == ((1, [4]) if hooked else (0, []))
    assert_same_bits(*ends)


def test_nothing_is_rehearsed_where_nothing_is_written(tmp_path: Path) -> None:
    class Counts(Toy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            calls.append(self.global_step)

    calls: list[int] = []
    quiet(max_epochs=1).fit(Counts(), loader(2))
    quiet(fast_dev_run=True, enable_checkpointing=True).fit(Counts(), loader(2))
    assert calls == []
    for _ in range(2):
        trainer = quiet(max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
        trainer.fit(Counts(), loader(2), ckpt_path="last")
        assert calls == [0, 2]


TWO = """
import sys
import torch
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback
from trainer.callbacks import ModelCheckpoint
from trainer.errors import CheckpointError

class Hooked(Toy):
    def on_save_checkpoint(self, checkpoint):
        if case == "one rank fails":
            assert self.global_step > 0 or self.global_rank > 0
        if case == "gathers after one has failed":
            assert self.global_step > 0 or self.global_rank > 0
            self.all_gather(torch.ones(3))
        rank = torch.tensor(float(self.global_rank))
        checkpoint["ranks"] = self.all_gather(rank) if case == "gathers" else [0.0]
        if case == f"spoiled on {self.global_rank}":
            checkpoint["ranks"] = {len}
        if case == f"later on {self.global_rank}" and self.global_step > 1:
            checkpoint["ranks"] = {len}
        if case == "later on 1 alone":
            del checkpoint["ranks"]
            if self.global_rank == 1 and self.global_step > 1:
                checkpoint["ranks"] = {len}

strategy, case, folder = sys.argv[1:]
callbacks = [ModelCheckpoint(folder)]
trainer = quiet(max_epochs=1, devices=2, strategy=strategy, callbacks=callbacks, enable_checkpointing=True)
try:
    trainer.fit(Hooked(), loader(4))
except CheckpointError as error:
    print(f"rank {trainer.global_rank} at {trainer.global_step}: {type(error).__name__}: {error}", flush=True)
    raise SystemExit
print("trained", flush=True)
"""


@pytest.mark.parametrize(
    ("strategy", "case", "reported"),
    [
        ("ddp", "gathers", None),
        ("ddp", "one rank fails", None),
        ("ddp", "spoiled on 0", "0: CheckpointError"),
        ("ddp", "spoiled on 1", None),  # rank 0 writes
        ("fsdp", "spoiled on 1", "0: CheckpointError"),
        ("ddp", "later on 0", "2: LeftOutError"),
        ("fsdp", "later on 1", "2: LeftOutError"),
        ("fsdp", "later on 1 alone", "2: LeftOutError"),
    ],
)
def test_several_processes(strategy: str, case: str, reported: str | None, tmp_path: Path) -> None:
    done = fork_python(TWO, strategy, case, tmp_path).wait().check()
    there = [path for path in tmp_path.iterdir() if path.name.startswith("epoch=")]
    if reported is None:
        assert done.stdout.count("trained") == 2
        [path] = there
        assert read_manifest(path).info["step"] == 2
        return
    for rank in (0, 1):
        assert f"rank {rank} at {reported}: " in done.stdout
    assert done.stdout.count("added['ranks']: it is a set") == 2
    assert [read_manifest(path).info["left_out"] for path in there] == [["added['ranks']"]] * ("LeftOut" in reported)


def test_a_collective_that_lacks_a_process_is_found(tmp_path: Path) -> None:
    done = fork_python(TWO, "ddp", "gathers after one has failed", tmp_path).wait()
    assert done.returncode == 1
    assert "the rehearsal of a checkpoint, before the first step" in done.stderr


# -- later -------------------------------------------------------------------------------------------------------------

LEFT_OUT = {
    "extra": ["model['extra._extra_state']"],
    "callback": ["callbacks['Keeps']"],
    "hook": ["added['saved']"],
    "data": ["data"],
}


@pytest.mark.parametrize("async_save", [False, True], ids=["in place", "in the background"])
@pytest.mark.parametrize("spoiled", [("callback",), ("hook",), ("data",), ("callback", "hook", "data")], ids=" ".join)
def test_a_checkpoint_is_written_without_what_it_cannot_hold(
    spoiled: tuple[str, ...], async_save: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [name for one in spoiled for name in LEFT_OUT[one]]
    with raises_recorded(LeftOutError):
        fit(Net(spoiled, before_step=4), tmp_path, 4, async_save=async_save, on_write_error="warn")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step=")) == ["step=2", "step=4"]
    assert sorted(read_manifest(tmp_path / "step=4").info["left_out"]) == sorted(names)
    caplog.clear()
    module = Net()
    trainer = fit(module, tmp_path, 4, "last")
    warning = next(one.getMessage() for one in caplog.records if "begins again" in one.getMessage())
    assert "step=4 was written without what could not be stored" in warning
    assert all(name in warning for name in names)
    assert (trainer.global_step, module.steps) == (8, [4, 5, 6, 7])
    assert module.callback.kept == module.callback.saved == module.data.kept == GOOD
    whole = Net()
    fit(whole, tmp_path / "whole", 4)
    assert_same_bits(module.state_dict(), whole.state_dict())
    # Those of before are deleted when there is one with everything.
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step=")] == ["step=8"]


@pytest.mark.parametrize("spoiled", ["optimizer", "scheduler"])
def test_without_what_trains_only_the_weights_are_written_and_last_stays(spoiled: str, tmp_path: Path) -> None:
    with raises_recorded(LeftOutError):
        fit(Net((spoiled,), before_step=4), tmp_path, 4)
    info = read_manifest(tmp_path / "step=4").info
    assert (info["left_out"], info["weights_only"]) == ([f"{spoiled}s"], True)
    with raises_recorded(CheckpointError):
        fit(Net(), tmp_path, 4, tmp_path / "step=4")
    module = Net()
    assert quiet().validate(module, loader(1), ckpt_path=tmp_path / "step=4")
    assert_same_bits(module.layer.weight, read_checkpoint(tmp_path / "step=4")["model"]["layer.weight"])
    assert fit(Net(), tmp_path, 3, "last").global_step == 6  # from step 2


def test_extra_state_is_left_out_and_missed_by_the_module(tmp_path: Path) -> None:
    with pytest.raises(LeftOutError):
        fit(Net(("extra",), before_step=2), tmp_path)
    with raises_recorded(CheckpointError):
        fit(Net(), tmp_path, 2, "last")
    module = Net()
    module.strict_loading = False
    assert fit(module, tmp_path, 2, "last").global_step == 4
