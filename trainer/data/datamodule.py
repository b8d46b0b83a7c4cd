"""DataModule: the data of a run in one reusable object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainer.arguments import ChecksArguments
from trainer.checkpoint.hook_checkpoint import ADDED
from trainer.checkpoint.lightning_file import read_located
from trainer.hyperparameters import HasHyperparameters, construct, constructor_arguments, read_hyperparameters
from trainer.model.optional_methods import OptionalMethods, no_loader
from trainer.names.misses import Answers

if TYPE_CHECKING:
    import torch

    from trainer.trainer import Trainer


def state_of_data(owner: type, checkpoint: Mapping[str, Any]) -> Any:
    """Return the state of a data module in a checkpoint; Lightning keeps it under the name of the class."""
    return checkpoint.get("data") or checkpoint.get(ADDED, {}).get(owner.__qualname__)


class DataModule(ChecksArguments, Answers, OptionalMethods, HasHyperparameters):
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

    The trainer shards plain DataLoaders over processes: no DistributedSampler is needed, and `batch_size` is one
    process's. A loader method that is not overridden means that there is no such data.
    """

    def __init__(self) -> None:
        super().__init__()

    prepare_data_per_node: bool = True
    """True: `prepare_data` runs once on every node (each has its own disk). False: once overall (a shared disk)."""

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
        raise no_loader(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        """Return one loader for validation, a list of them, or a dict of name to loader."""
        raise no_loader(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        """Return one loader for `trainer.test`, a list of them, or a dict of name to loader."""
        raise no_loader(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return one loader for `trainer.predict`, a list of them, or a dict of name to loader."""
        raise no_loader(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed if need be, before the transfer to the device. Instead of the module's."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on `device`, by default the tensors in nested containers. Instead of the module's."""
        assert self.trainer is not None
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    # -- Lightning's further names -------------------------------------------------------------------------------------

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **options: Any,
    ) -> DataModule:
        """Return a data module with a DataLoader for each dataset; training is shuffled, but for an IterableDataset.

        Args:
            train_dataset, val_dataset, test_dataset, predict_dataset: a dataset, a list of datasets, or a dict by name.
            batch_size, num_workers: of the loaders; also arguments of the constructor of `cls`, where it has them.
            options: further arguments of the constructor.
        """
        from torch.utils.data import DataLoader, IterableDataset

        def loader(dataset: Any, shuffle: bool) -> Any:
            shuffle = shuffle and not isinstance(dataset, IterableDataset)
            return DataLoader(dataset, batch_size, shuffle=shuffle, num_workers=num_workers)

        def loaders(datasets: Any, shuffle: bool) -> Any:
            if isinstance(datasets, Mapping):
                return {name: loader(dataset, shuffle) for name, dataset in datasets.items()}
            # A sequence that can be added to others is a dataset, such as torch's.
            is_list = (isinstance(datasets, Sequence) and not hasattr(datasets, "__add__")) or type(datasets) is list
            return [loader(one, shuffle) for one in datasets] if is_list else loader(datasets, shuffle)

        parameters = signature(cls).parameters
        of_loaders = {"batch_size": batch_size, "num_workers": num_workers}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        module = cls(**options, **{name: one for name, one in of_loaders.items() if takes_any or name in parameters})
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, datasets in given.items():
            if datasets is not None:
                setattr(module, f"{stage}_dataloader", partial(loaders, datasets, shuffle=stage == "train"))
        return module

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **hyperparameters: Any,
    ) -> Self:
        """Build the data module from a checkpoint's hyperparameters and restore its state.

        Args:
            checkpoint_path: a checkpoint folder, or a file in Lightning's shape.
            map_location, weights_only: no effect: a data module's state is on the CPU, and contains no code.
            hparams_file: a file of hyperparameters, YAML or JSON, which replace the checkpoint's.
            hyperparameters: override the stored ones.

        Raises:
            CheckpointError: there is no valid checkpoint, or its hyperparameters do not fit.
        """
        checkpoint = read_located(checkpoint_path)
        kept = checkpoint.get("hyperparameters", {})
        stored, kinds = kept.get("data", {}), kept.get("kinds", {}).get("data")
        if hparams_file is not None:
            stored, kinds = read_hyperparameters(hparams_file), None
        inside = kept.get("arguments", {}).get("data")
        datamodule = construct(cls, constructor_arguments(cls, stored, inside, hyperparameters, kinds))
        if state := state_of_data(cls, checkpoint):
            datamodule.load_state_dict(state)
        return datamodule

    def __str__(self) -> str:
        """Return the loaders that are defined."""
        names = [f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")]
        return f"{type(self).__name__}({', '.join(filter(self.overrides, names)) or 'no loaders'})"

    # -- where it runs -------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer | None:
        """The trainer that uses this data module; None before a run, so that `setup` can also be called by hand."""
        return self.__dict__.get("_trainer")

    @trainer.setter
    def trainer(self, given: Trainer | None) -> None:
        self.attach(given)

    def attach(self, trainer: Trainer | None) -> None:
        """Set `self.trainer`, which stays out of copies and pickles."""
        self.__dict__["_trainer"] = trainer

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_trainer"}
