"""DataModule: where a run's data comes from, in one reusable object."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.hyperparameters import Hyperparameters, collect_hyperparameters

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class DataModule:
    """Subclass it, define the loaders that you need, and give it to `fit`, `validate`, `test` or `predict`.

    Example::

        class Digits(DataModule):
            def __init__(self, batch_size: int = 32) -> None:
                super().__init__()
                self.save_hyperparameters()

            def prepare_data(self) -> None:
                download_once()

            def setup(self, stage: str) -> None:
                self.train, self.val = load_and_split()

            def train_dataloader(self):
                return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, batch_size=256)

        trainer.fit(module, datamodule=Digits(batch_size=64))

    Plain DataLoaders are split over processes by the trainer: no DistributedSampler is needed, and `batch_size` is that
    of one process. A method that is not defined means that there is no such data.
    """

    prepare_data_per_node: bool = True
    """True: `prepare_data` runs once on every node (each has its own disk). False: once in all (a shared disk)."""

    def prepare_data(self) -> None:
        """Download and the like: runs in one process per node, before the others go on. Set no attributes here: the
        other processes would not have them."""

    def setup(self, stage: str) -> None:
        """Build datasets. Runs on every process, before the loaders of a stage are asked for.

        Args:
            stage: "fit" (training and validation), "validate", "test" or "predict".
        """

    def train_dataloader(self) -> Any:
        """One DataLoader, or any iterable of batches, for training."""

    def val_dataloader(self) -> Any:
        """For validation: one loader, a list of them, or a dict of name to loader."""

    def test_dataloader(self) -> Any:
        """For `trainer.test`: one loader, a list of them, or a dict of name to loader."""

    def predict_dataloader(self) -> Any:
        """For `trainer.predict`: one loader, a list of them, or a dict of name to loader."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage; runs on every process."""

    def state_dict(self) -> dict[str, Any]:
        """Data to keep in every checkpoint (numbers, strings, lists, dicts, tensors); empty: nothing. The position in
        the data is kept by the trainer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    # -- hyperparameters -----------------------------------------------------------------------------------------------

    @property
    def hparams(self) -> Hyperparameters:
        """What `save_hyperparameters` kept; empty without it."""
        stored: Hyperparameters = self.__dict__.setdefault("_hparams", Hyperparameters())
        return stored

    def save_hyperparameters(self, *names: str, ignore: Collection[str] = (), **values: Any) -> None:
        """Keep the arguments of `__init__` in `self.hparams` and in every checkpoint. Call it inside `__init__`.

        Args:
            names: keep only these arguments.
            ignore: leave these arguments out.
            values: keep these instead of what the arguments say.

        Raises:
            ConfigError: a value is not data (a dataset, a function, a path ...): a checkpoint could not store it.
        """
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        self.hparams.update(collect_hyperparameters(caller, type(self), names, ignore, values))

    # -- where it runs -------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer that uses this data module.

        Raises:
            ConfigError: there is none, because it is not inside `fit`, `validate`, `test` or `predict`.
        """
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise ConfigError(
                f"{type(self).__name__} is not attached to a Trainer yet: self.trainer works inside trainer.fit, "
                "validate, test and predict."
            )
        return trainer

    def attach(self, trainer: Trainer | None) -> None:
        """Tell the data module who uses it. Kept out of copies and pickles."""
        self.__dict__["_trainer"] = trainer

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_trainer"}

    def overrides(self, name: str) -> bool:
        """Whether the subclass (or this instance) defines the method `name` itself."""
        return name in self.__dict__ or getattr(type(self), name, None) is not getattr(DataModule, name, None)
