"""A failing rank ends the run at once, also where the device is behind the host and the process group cannot be left.

Survivors' hosts run ahead of their devices, on which a collective of the failed rank never ends: destroying the process
group, as at the end of each process, and waiting for the device would block for ever.
"""

from __future__ import annotations

import pytest

from tests.helpers.emulated import device as emulated
from tests.helpers.processes import run_python

SCRIPT = """
import sys, time
from tests.helpers.emulated import device
device.install()
device.extension().run_ahead(True)
import torch
from tests.helpers.compare import QUIET
from tests.helpers.toy import Toy, loader
from trainer import Callback, Trainer


class Slow(Toy):
    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        if batch_idx == 3 and self.trainer.rank == 1:
            raise ValueError("a mistake on one rank")
        return super()._loss(batch)


class Waiting(Callback):
    def on_exception(self, trainer, module, error):
        if "wait" in sys.argv:
            torch.accelerator.synchronize()


Trainer(
    accelerator="emulated", devices=2, max_steps=300, log_every_n_steps=1000, callbacks=[Waiting()], **QUIET
).fit(Slow(), loader(batches=2000))
"""


@pytest.mark.parametrize("also", [[], ["wait"]], ids=["leaving", "a callback that waits for the device"])
def test_the_run_ends_though_a_collective_is_outstanding(also: list[str]) -> None:
    emulated.skip_if_missing()
    result = run_python(SCRIPT, *also, timeout=240)  # ends what hangs, with an error
    assert result.returncode == 1
    assert result.stderr.count("ValueError: a mistake on one rank") == 1
    assert "rank 1 of 2 failed:" in result.stderr
    assert "rank 0 stops because rank 1 failed" in result.stderr
