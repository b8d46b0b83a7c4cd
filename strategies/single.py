"""One process, one device."""

from __future__ import annotations

from typing import ClassVar

from trainer.estimate import Layout
from trainer.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """Everything on one device: every verb's default."""

    name: ClassVar[str] = "single_device"

    def memory_layout(self) -> Layout:
        return Layout(self.name)
