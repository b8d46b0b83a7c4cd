"""DataModule: the data of a run in one reusable object."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.hyperparameters import Hyperparameters, collect_hyperparameters
from trainer.model.optional_methods import OptionalMethods

if TYPE_CHECKING:
    import torch

    from trainer.trainer import Trainer


class DataModule(OptionalMethods):
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

    The trainer shards plain DataLoaders over processes: no DistributedSampler is needed, and `batch_size` is that of
    one process. A loader method that is not overridden means that there is no such data.
    """

    prepare_data_per_node: bool = True
    """True: `prepare_data` runs once on every node (each has its own disk). False: once in all (a shared disk)."""

    def prepare_data(self) -> None:
        """Download, tokenize and so on. Runs in one process per node, before the others continue; set no attributes
        here, the other processes would not have them."""

    def setup(self, stage: str) -> None:
        """Build datasets. Runs on every process, before the loader methods of a stage are called.

        Args:
            stage: "fit" (training and validation), "validate", "test" or "predict".
        """

    def train_dataloader(self) -> Any:
        """Return one DataLoader, or any iterable of batches, for training."""

    def val_dataloader(self) -> Any:
        """Return one loader for validation, a list of them, or a dict of name to loader."""

    def test_dataloader(self) -> Any:
        """Return one loader for `trainer.test`, a list of them, or a dict of name to loader."""

    def predict_dataloader(self) -> Any:
        """Return one loader for `trainer.predict`, a list of them, or a dict of name to loader."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed if need be, before the transfer to the device. Instead of the module's."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on `device`, by default the tensors in nested containers. Instead of the module's."""
        return self.trainer.strategy.to_device(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed if need be, after the transfer: for augmentation, say. Instead of the module's."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Clean up after an exception, before `teardown`."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage; runs on every process."""

    def state_dict(self) -> dict[str, Any]:
        """Return data to keep in every checkpoint (numbers, strings, lists, dicts, tensors). The trainer keeps the
        position in the data itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    # -- hyperparameters -----------------------------------------------------------------------------------------------

    @property
    def hparams(self) -> Hyperparameters:
        """The arguments that `save_hyperparameters` kept; empty without it."""
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
            ConfigError: there is no trainer, because `fit`, `validate`, `test` or `predict` has not been called yet.
        """
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise ConfigError(
                f"{type(self).__name__} is not attached to a Trainer yet: self.trainer works inside trainer.fit, "
                "validate, test and predict."
            )
        return trainer

    def attach(self, trainer: Trainer | None) -> None:
        """Set `self.trainer`, which stays out of copies and pickles."""
        self.__dict__["_trainer"] = trainer

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_trainer"}
