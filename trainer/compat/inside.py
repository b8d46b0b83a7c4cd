"""Loops and connectors of Lightning's Trainer, as views to read: the few attributes that packages ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from trainer.checkpoint.lightning_file import lightning_entries
from trainer.checkpoint.writing import write_checkpoint
from trainer.compat.accelerators import ACCELERATORS, XLAAccelerator
from trainer.compat.names import BESIDE_VIEWS
from trainer.compat.plugins import TorchCheckpointIO
from trainer.data.combined_loader import CombinedLoader
from trainer.errors import ConfigError
from trainer.names.aliases import Alias
from trainer.runs.resolved_config import ResolvedConfig, resolve_config
from trainer.settings import Settings
from trainer.strategy import Strategy

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class View:
    """Base of the views. Any other attribute is answered by what to use, and none can be set."""

    def __init__(self, name: str, *others: Any, **parts: Any) -> None:
        if others or not isinstance(name, str):
            raise ConfigError(
                f"{type(self).__name__} cannot be made: the Trainer's loops are only read here. Override the hooks of "
                "a module or callback instead, such as on_test_epoch_end, which can print trainer.callback_metrics."
            )
        vars(self).update(_name=name, **parts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{self._name} has no attribute {name!r} here. Use {BESIDE_VIEWS}.")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self._name}.{name} can only be read. Use {BESIDE_VIEWS}.")


class Loop(View):
    """A loop over the loaders of one kind: "train", "val", "test" or "predict"."""

    trainer: Trainer
    kind: str

    @property
    def _combined_loader(self) -> CombinedLoader | None:
        given = self.trainer._given_loaders(self.kind)
        mode: Any = "max_size_cycle" if self.kind == "train" else "sequential"
        return given if given is None or isinstance(given, CombinedLoader) else CombinedLoader(given, mode)

    @property
    def _data_source(self) -> View:
        self.setup_data()
        run = self.trainer.run
        source = run.module if run.datamodule is None else run.datamodule
        defined = self._combined_loader is not None or source.overrides(f"{self.kind}_dataloader")
        return View("_data_source", is_defined=lambda: defined)

    def setup_data(self) -> None:
        """Make the loaders of the run, unless they are there."""
        self.trainer.run.loaders.needed()


class EvaluationLoop(Loop):
    """The validations of `fit`, or another stage."""

    @property
    def max_batches(self) -> list[int | float]:
        """The batches of each loader; in the sanity check only those of the check."""
        checks = "sanity_" if self.trainer.sanity_checking else ""
        return list(getattr(self.trainer, f"num_{checks}{self.kind}_batches"))

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return len(self.max_batches)


class EpochLoop(Loop):
    """The batches of an epoch of training."""

    max_steps = Alias("trainer.max_steps")
    min_steps = Alias("trainer.min_steps")
    global_step = Alias("trainer.global_step")

    @property
    def val_loop(self) -> EvaluationLoop:
        """The validations."""
        return EvaluationLoop("val_loop", trainer=self.trainer, kind="val")

    @property
    def batch_progress(self) -> View:
        """The counts of this epoch (`current`, which begin at its first batch) and of all epochs (`total`)."""
        progress, length = self.trainer.progress, self.trainer.num_training_batches
        begun, more_follow, ends = self._in_window
        ready = progress.batch + begun
        processed = ready - int(begun > 0 and not (ends and more_follow))
        completed = ready - int(begun > 0 or ends)
        before = progress.batches_before
        total = View("total", ready=before + ready, processed=before + processed, completed=before + completed)
        if ready == 0 and not progress.epoch_started:
            ready = processed = completed = progress.batches_of_last_epoch
        current = View("current", ready=ready, processed=processed, completed=completed)
        known = {} if math.isinf(length) else {"is_last_batch": 0 < ready == length}
        return View("batch_progress", current=current, total=total, **known)

    @property
    def batch_idx(self) -> int:
        """The number of the batch in its epoch; -1 before the first."""
        return int(self.batch_progress.current.ready) - 1

    @property
    def total_batch_idx(self) -> int:
        """The number of the batch in all epochs; -1 before the first."""
        return int(self.batch_progress.total.ready) - 1

    @property
    def _batches_that_stepped(self) -> int:
        """The steps whose last hook, and the validation after it, have ended."""
        begun, _, ends = self._in_window
        validates = self.trainer.stage == "fit" and self.trainer.validating
        return self.trainer.global_step - int(validates or (ends and not begun))

    def _should_accumulate(self) -> bool:
        return self._in_window[1]

    @property
    def _in_window(self) -> tuple[int, bool, bool]:
        """The micro-batches begun in the window in progress, whether more follow, and whether the last one ends.

        A micro-batch ends with the last hook after its backward.
        """
        run = self.trainer._run
        step = None if run is None else vars(run).get("step")
        if run is None or step is None:
            return 0, False, False
        begun = step.position + 1 if run.epoch.inside_window else 0
        return begun, 0 < begun < len(step.window), step.data is not None


class FitLoop(Loop):
    """The epochs of `fit`."""

    batch_idx = Alias("epoch_loop.batch_idx")
    total_batch_idx = Alias("epoch_loop.total_batch_idx")
    max_steps = Alias("trainer.max_steps")
    min_steps = Alias("trainer.min_steps")
    max_epochs = Alias("trainer.max_epochs")
    min_epochs = Alias("trainer.settings.least_epochs")
    max_batches = Alias("trainer.num_training_batches")

    @property
    def epoch_loop(self) -> EpochLoop:
        """The batches."""
        return EpochLoop("epoch_loop", trainer=self.trainer, kind="train")

    @property
    def epoch_progress(self) -> View:
        """The counts of epochs."""
        progress, run = self.trainer.progress, self.trainer._run
        inside = run is not None and run.epoch.in_progress
        counts = View(
            "epoch_progress",
            ready=progress.epoch + int(inside),
            started=progress.epoch + int(inside and progress.epoch_started),
            processed=progress.epoch + int(inside and progress.epoch_ended),
            completed=progress.epoch,
        )
        return View("epoch_progress", current=counts, total=counts)


def _logger_connector(trainer: Trainer) -> View:
    """Return the view that knows, in training, whether the step in progress is logged."""
    if not trainer.training:
        return View("_logger_connector")
    step = EpochLoop("epoch_loop", trainer=trainer)._batches_that_stepped + 1
    return View("_logger_connector", should_update_logs=trainer.settings.logs_at(step) or trainer.should_stop)


class AcceleratorConnector(View):
    """The choice of devices and strategy, as a Trainer with these arguments makes it."""

    def __init__(
        self,
        devices: Any = "auto",
        num_nodes: int = 1,
        accelerator: str = "auto",
        strategy: Any = "auto",
        config: ResolvedConfig | None = None,
        **others: Any,
    ) -> None:
        if config is None:
            off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
            places = {"devices": devices, "num_nodes": num_nodes, "accelerator": accelerator, "strategy": strategy}
            config = resolve_config(Settings(**places, **{**off, **others}))
        super().__init__("_accelerator_connector", _config=config)

    _accelerator_flag = Alias("_config.device_type")

    @property
    def _devices_flag(self) -> int | list[int]:
        found: int | list[int] = self._config.devices if self._config.device_ids is None else self._config.device_ids
        return found

    @property
    def _parallel_devices(self) -> list[torch.device]:
        kind = self._config.device_type
        return [torch.device(kind, *([] if kind == "cpu" else [one])) for one in self._config.used_devices]

    @property
    def is_distributed(self) -> bool:
        """Whether the strategy can have several processes."""
        return bool(self._config.strategy.multi_process)

    @property
    def strategy(self) -> Any:
        """The strategy; before a run with the device that it will have."""
        strategy = self._config.strategy
        if hasattr(strategy, "device"):
            return strategy
        return _Planned(strategy, self._parallel_devices[strategy.processes.local_rank])


class _Planned:
    """A strategy before its run, which knows its device."""

    def __init__(self, strategy: Strategy, device: torch.device) -> None:
        self._strategy, self.root_device = strategy, device

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the strategy, for `isinstance`."""
        return type(self._strategy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def _dump_checkpoint(trainer: Trainer, weights_only: bool = False) -> dict[str, Any]:
    """Return the entries of a checkpoint of this moment. Collective."""
    with TemporaryDirectory() as near:
        folder = Path(near, "checkpoint")
        write = partial(write_checkpoint, folder, process_group=trainer.checkpoint_group)
        trainer.save_with(lambda state, about: write(state, info=about), {}, weights_only)
        return lightning_entries(folder)


def _val_batches(bar: Any) -> int | float:
    """Return the batches of the validation in this epoch; 0 without one."""
    trainer = bar.trainer
    every: int = trainer.check_val_every_n_epoch or 1
    return 0 if (trainer.current_epoch + 1) % every else sum(trainer.num_val_batches)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "trainer": lambda bar: bar._run[0],
    "print": lambda bar: bar.trainer.print,
    "total_train_batches": lambda bar: bar.trainer.num_training_batches,
    "total_val_batches": _val_batches,
    "is_enabled": lambda bar: bar.refresh_rate > 0,
    "is_disabled": lambda bar: bar.refresh_rate == 0,
    "accelerator": lambda trainer: ACCELERATORS.get(trainer.config.device_type, XLAAccelerator)(),
    "checkpoint_io": lambda strategy: TorchCheckpointIO(),
    "fit_loop": lambda trainer: FitLoop("fit_loop", trainer=trainer, kind="train"),
    "validate_loop": lambda trainer: EvaluationLoop("validate_loop", trainer=trainer, kind="val"),
    "test_loop": lambda trainer: EvaluationLoop("test_loop", trainer=trainer, kind="test"),
    "predict_loop": lambda trainer: EvaluationLoop("predict_loop", trainer=trainer, kind="predict"),
    "_accelerator_connector": lambda trainer: AcceleratorConnector(config=trainer.config),
    "barebones": lambda trainer: False,
    "_checkpoint_connector": lambda trainer: View(
        "_checkpoint_connector", _ckpt_path=trainer.ckpt_path, dump_checkpoint=partial(_dump_checkpoint, trainer)
    ),
    "_logger_connector": _logger_connector,
}
"""Lightning's attribute of a Trainer, a strategy or a progress bar -> the function that makes the view."""
