"""Lightning's accelerators: names of devices that know which devices there are."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch

from trainer.callbacks.device_stats_monitor import accelerator_stats, cpu_stats
from trainer.distributed.devices import choose_accelerator, parse_devices
from trainer.settings import error_of


class Accelerator(str):
    """A value of `Trainer(accelerator=)`: the name of a kind of device."""

    kind: ClassVar[str] = ""

    def __new__(cls) -> Self:
        """Return the name; that of a class of your own is none of the Trainer's, which says so."""
        return super().__new__(cls, cls.kind or cls.__name__)

    @classmethod
    def name(cls) -> str:
        """Return the name."""
        return cls.kind

    @classmethod
    def is_available(cls) -> bool:
        """Whether there is such a device."""
        return not error_of(lambda: choose_accelerator(cls.kind))

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices that `devices="auto"` takes."""
        return parse_devices("auto", cls.kind)[0]

    @classmethod
    def parse_devices(cls, devices: Any) -> int | list[int]:
        """Return a value of `Trainer(devices=)` as a number of processes on the CPU, else as numbers of devices.

        Raises:
            ConfigError: there are no such devices.
        """
        count, chosen, _ = parse_devices(devices, cls.kind)
        return count if cls.kind == "cpu" else chosen or [*range(count)]

    def get_device_stats(self, device: Any) -> dict[str, float]:
        """Return what DeviceStatsMonitor logs of a device."""
        return accelerator_stats(torch.device(device)) or cpu_stats()


class CPUAccelerator(Accelerator):
    """CPUs."""

    kind = "cpu"


class CUDAAccelerator(Accelerator):
    """GPUs of NVIDIA and AMD."""

    kind = "cuda"


class MPSAccelerator(Accelerator):
    """GPUs of Apple."""

    kind = "mps"


class XLAAccelerator(Accelerator):
    """TPUs."""

    kind = "tpu"


ACCELERATORS = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator, "tpu": XLAAccelerator}
"""Type of device -> the accelerator."""
