"""Lightning's accelerators: names of devices that know which devices there are."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch

from trainer.callbacks.device_stats_monitor import accelerator_stats, cpu_stats
from trainer.distributed.devices import choose_accelerator, parse_devices
from trainer.errors import ConfigError


class Accelerator(str):
    """A value of `Trainer(accelerator=)`: the name of a kind of device."""

    _name: ClassVar[str] = ""

    def __new__(cls) -> Self:
        """Return the name; that of a class of your own is none of the Trainer's, which says so."""
        return super().__new__(cls, cls._name or cls.__name__)

    @classmethod
    def name(cls) -> str:
        """Return the name."""
        return cls._name

    @classmethod
    def is_available(cls) -> bool:
        """Whether there is such a device."""
        try:
            choose_accelerator(cls._name)
        except ConfigError:
            return False
        return True

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices that `devices="auto"` takes."""
        return parse_devices("auto", cls._name)[0]

    @classmethod
    def parse_devices(cls, devices: Any) -> int | list[int]:
        """Return a value of `Trainer(devices=)` as a number of processes on the CPU, else as numbers of devices.

        Raises:
            ConfigError: there are no such devices.
        """
        count, chosen, _ = parse_devices(devices, cls._name)
        return count if cls._name == "cpu" else chosen or [*range(count)]

    @classmethod
    def get_parallel_devices(cls, devices: Any) -> list[torch.device]:
        """Return the devices of a value of `Trainer(devices=)`."""
        found = cls.parse_devices(devices)
        if isinstance(found, int):
            return [torch.device("cpu")] * found
        return [torch.device(cls._name, number) for number in found]

    def get_device_stats(self, device: Any) -> dict[str, float]:
        """Return what DeviceStatsMonitor logs of a device."""
        return accelerator_stats(torch.device(device)) or cpu_stats()


class CPUAccelerator(Accelerator):
    """CPUs."""

    _name = "cpu"


class CUDAAccelerator(Accelerator):
    """GPUs of NVIDIA and AMD."""

    _name = "cuda"


class MPSAccelerator(Accelerator):
    """GPUs of Apple."""

    _name = "mps"


class XLAAccelerator(Accelerator):
    """TPUs."""

    _name = "tpu"


def accelerator_of(device_type: str) -> Accelerator | str:
    """Return the accelerator of a type of device; one that Lightning does not have is a text."""
    kinds = {kind._name: kind for kind in Accelerator.__subclasses__()}
    kind = kinds.get({"xla": "tpu"}.get(device_type, device_type))
    return device_type if kind is None else kind()
