"""Between two flushes no device value is read, and nothing is sent to other processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import run_distributed
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import CSVLogger

READS = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero")
"""Operations whose result the host waits for."""
METHODS = ("cpu", "numpy", "tolist", "item", "__float__", "__int__", "__bool__", "__index__", "__array__")


class Reads(TorchDispatchMode):
    """Count host reads of tensors, in the main thread and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.methods = _Methods(self.seen)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith(READS):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self.methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.methods.__exit__(*error)


class _Methods(TorchFunctionMode):
    """Count `tolist` and `numpy`, which dispatch nothing on the CPU, and hide that the tensors are there.

    What is on the CPU may be read in each step.
    """

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return False
        name = getattr(function, "__name__", "")
        if name in METHODS:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
)


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Count calls of torch.distributed's functions (those of DDP go through its C++ reducer)."""
    seen: Counter[str] = Counter()
    before = {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        yield seen
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


class Module(TrainModule):
    """A module that logs tensors in every way: by step, over the epoch, reduced, weighted, in the bar."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        output = self.layer(x)
        loss = output.square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss * 2, on_step=True, on_epoch=True)
        self.log("largest", output.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("weighted", loss, on_step=False, on_epoch=True, weight=x.count_nonzero())
        self.log("number", 0.5, on_step=False, on_epoch=True, weight=x.count_nonzero())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        # Adam reads its own step counters, which are host tensors on every device.
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Between(Callback):
    """A callback that enters a context after the complete step `first` and leaves it after step `last`."""

    runs_last = True

    def __init__(self, context: Any, first: int, last: int) -> None:
        self.context, self.first, self.last = context, first, last
        self.found: Any = None

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == self.first:
            self.found = self.context.__enter__()
        elif trainer.global_step == self.last:
            self.context.__exit__(None, None, None)


def loader(samples: int = 96) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(samples, 4)), batch_size=4)


def fit(*callbacks: Callback, **settings: Any) -> None:
    options: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "log_every_n_steps": 12,
        "logger": CSVLogger(),
        "callbacks": [*callbacks],
    }
    Trainer(**{**options, **settings}).fit(Module(), loader(), loader(8))


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_clip_val": 1.0}, {"precision": "bf16-mixed"}], ids=["plain", "clipping", "bf16"]
)
def test_no_device_value_is_read_between_two_flushes(settings: dict[str, Any]) -> None:
    between = Between(Reads(), first=1, last=11)
    fit(between, **settings)
    assert between.found.seen == {}


def test_an_accumulating_window_reads_nothing_either() -> None:
    between = Between(Reads(), first=1, last=5)
    fit(between, accumulate_grad_batches=2, log_every_n_steps=6)
    assert between.found.seen == {}


def test_a_bar_may_ask_for_its_values_in_each_step() -> None:
    shown: dict[int, dict[str, float]] = {}
    latest: dict[int, float] = {}
    kept: Mapping[str, float] = {}

    class Bar(Callback):
        def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
            nonlocal kept
            kept = trainer.flushed_progress_bar_metrics

        def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
            shown[trainer.global_step] = dict(kept)
            if trainer.global_step == 12:
                latest[12] = trainer.progress_bar_metrics["loss"]

    between = Between(Reads(), first=1, last=11)
    fit(Bar(), between)
    assert between.found.seen == {}
    assert shown[11] == {}
    assert list(shown[13]) == ["loss"]
    assert shown[13]["loss"] == shown[23]["loss"] == pytest.approx(latest[12])


def test_a_read_would_be_seen() -> None:
    class Reading(Callback):
        def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
            float(next(module.parameters()).grad.sum())  # type: ignore[union-attr]

    between = Between(Reads(), first=1, last=11)
    fit(Reading(), between)
    assert between.found.seen["__float__"] == 10


def test_a_flush_is_one_read_of_all_values() -> None:
    between = Between(Reads(), first=11, last=13)
    fit(between)
    assert between.found.seen["tolist"] == 1


def _count_collectives() -> list[dict[str, int]]:
    torch.manual_seed(0)
    between, flush = Between(collectives(), first=1, last=5), Between(collectives(), first=5, last=7)
    fit(between, flush, devices=2, strategy="ddp", enable_checkpointing=False, log_every_n_steps=6)
    return [dict(between.found), dict(flush.found)]


def test_between_two_flushes_processes_talk_only_about_gradients_and_a_flush_is_one_message() -> None:
    for between, flush in run_distributed(_count_collectives):
        assert between == {}
        assert flush == {"all_gather": 2}  # a message is its size, and its bytes


@pytest.mark.gpu
def test_cuda_is_not_waited_for_between_two_flushes() -> None:
    class Audit:
        def __enter__(self) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *error: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    try:
        fit(Between(Audit(), first=1, last=11), accelerator="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
