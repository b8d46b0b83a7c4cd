"""DeviceStatsMonitor: log the memory and load of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainer.callback import Callback
from trainer.errors import require_package

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Log statistics of each process's device every `log_every_n_steps`, before and after a step, and in evaluations.

    On an accelerator: allocator statistics such as `allocated_bytes.all.peak`, averaged over the processes. On a CPU:
    `cpu_percent`, `cpu_vm_percent` and `cpu_swap_percent`, in percent, measured by psutil. The names begin with the
    hook, as in `DeviceStatsMonitor.on_train_batch_end/cpu_percent`. No value is read from a device.

    Args:
        cpu_stats: log the CPU's statistics. Default: only if the run's device is a CPU.

    Raises:
        MissingPackageError: at the start of a run, when psutil is needed and not installed.
    """

    agree_on = ("cpu_stats",)

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if self._includes_cpu(trainer.device):
            require_package("psutil", "DeviceStatsMonitor of a CPU")

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        if trainer.settings.logs_at(trainer.global_step + 1):
            self._log(trainer, "on_train_batch_start")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.settings.logs_at(trainer.global_step):
            self._log(trainer, "on_train_batch_end")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0:
            self._log(trainer, "on_test_batch_end" if trainer.testing else "on_validation_batch_end")

    on_test_batch_end = on_validation_batch_end

    def _includes_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu" if self.cpu_stats is None else self.cpu_stats

    def _log(self, trainer: Trainer, hook: str) -> None:
        stats = accelerator_stats(trainer.device)
        if self._includes_cpu(trainer.device):
            stats |= cpu_stats()
        for name, value in stats.items():
            trainer.log(f"{type(self).__qualname__}.{hook}/{name}", float(value), weight=1)


def accelerator_stats(device: torch.device) -> dict[str, float]:
    """Return the statistics of the allocator of a device; empty for those without one."""
    if device.type == "cpu":
        return {}
    stats = getattr(torch.get_device_module(device), "memory_stats", None)
    return {} if stats is None else {name: value for name, value in stats(device).items() if isinstance(value, int)}


def cpu_stats() -> dict[str, float]:
    """Return the load of this machine's CPUs since the last call, and of its memory, in percent."""
    import psutil  # type: ignore[import-untyped]  # types-psutil is not needed for three calls

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
