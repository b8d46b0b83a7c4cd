"""A PyTorch trainer with callbacks. Users import from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.names.paths import install

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CheckpointError",
    "ConfigError",
    "DataModule",
    "Engine",
    "LengthGroupedSampler",
    "LightningDataModule",
    "LightningModule",
    "Logger",
    "PackedDataset",
    "Precision",
    "Strategy",
    "TrainModule",
    "Trainer",
    "Tuner",
    "__version__",
    "launch",
    "seed_everything",
]

if TYPE_CHECKING:
    from trainer.callback import Callback
    from trainer.data.datamodule import DataModule
    from trainer.data.datamodule import DataModule as LightningDataModule
    from trainer.data.length_grouped_sampler import LengthGroupedSampler
    from trainer.data.packed_dataset import PackedDataset
    from trainer.engine import Engine
    from trainer.errors import CheckpointError, ConfigError
    from trainer.launchers.notebook import launch
    from trainer.logger import Logger
    from trainer.module import TrainModule
    from trainer.module import TrainModule as LightningModule
    from trainer.precision import Precision
    from trainer.seed import seed_everything
    from trainer.strategy import Strategy
    from trainer.trainer import Trainer
    from trainer.tuner import Tuner

_HOMES = {
    "Callback": "trainer.callback",
    "CheckpointError": "trainer.errors",
    "ConfigError": "trainer.errors",
    "DataModule": "trainer.data.datamodule",
    "Engine": "trainer.engine",
    "LengthGroupedSampler": "trainer.data.length_grouped_sampler",
    "Logger": "trainer.logger",
    "PackedDataset": "trainer.data.packed_dataset",
    "Precision": "trainer.precision",
    "Strategy": "trainer.strategy",
    "TrainModule": "trainer.module",
    "Trainer": "trainer.trainer",
    "Tuner": "trainer.tuner",
    "launch": "trainer.launchers.notebook",
    "seed_everything": "trainer.seed",
}

install()  # Lightning's modules, such as trainer.loggers

if not TYPE_CHECKING:  # with it, a type checker would accept every name

    def __getattr__(name: str) -> Any:
        # Imported on first use, so that `trainer --help` does not wait for torch.
        if name not in _HOMES:
            import sys

            from trainer.compat.finder import lightning_name

            return lightning_name(sys.modules[__name__], name)
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted(__all__)
