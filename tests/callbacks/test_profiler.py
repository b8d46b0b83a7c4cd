"""SimpleProfiler: the parts are told apart, and add up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.callbacks.toy import Toy, loader, quiet
from trainer.callbacks import LambdaCallback, SimpleProfiler
from trainer.callbacks.profiler import BACKWARD, BY_HAND, DATA, FORWARD, OPTIMIZER, OTHER, VALIDATION


class SlowData:
    """Each batch takes 10 ms to come."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for batch in loader(4):
            time.sleep(0.01)
            yield batch


class Slow(Toy):
    """20 ms forward, 30 ms validation, 40 ms in the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.03)

    def configure_optimizers(self) -> Any:
        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                time.sleep(0.04)
                return super().step(closure)

        return SGD(self.parameters(), lr=0.1)


def test_each_part_gets_its_own_time(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = SimpleProfiler()
    pause = LambdaCallback(on_train_step_end=lambda trainer, module: time.sleep(0.005))
    began = time.perf_counter()
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2, profiler=profiler, callbacks=[pause])
    trainer.fit(Slow(), SlowData(), loader(1))
    whole = time.perf_counter() - began
    expected = {DATA: 4 * 0.01, FORWARD: 4 * 0.02, OPTIMIZER: 2 * 0.04, VALIDATION: 0.03, OTHER: 2 * 0.005}
    for part, seconds in expected.items():
        assert profiler.seconds[part] >= seconds, part
    assert profiler.seconds[FORWARD] < 4 * 0.02 + 0.05
    assert profiler.calls[BACKWARD] == 4
    assert profiler.calls[OPTIMIZER] == 2
    assert sum(profiler.seconds.values()) < whole
    printed = capsys.readouterr().out
    assert "part of training" in printed
    assert all(part in printed for part in (*expected, BACKWARD, "total"))


def test_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_epochs=1, profiler="simple").fit(Toy(), loader(2))
    assert "part of training" in capsys.readouterr().out


def test_manual_optimization() -> None:
    class Manual(Toy):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self._loss(batch))
            optimizer.step()

    profiler = SimpleProfiler()
    quiet(max_epochs=1, profiler=profiler).fit(Manual(), loader(3))
    assert profiler.calls[BY_HAND] == 3
    assert FORWARD not in profiler.calls
