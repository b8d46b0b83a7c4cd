"""One process, one device."""

from __future__ import annotations

from typing import ClassVar

from trainer.strategy import Strategy


class SingleDeviceStrategy(Strategy):
    """Everything on one device: every method's default."""

    name: ClassVar[str] = "single_device"
