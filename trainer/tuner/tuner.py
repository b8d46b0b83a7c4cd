"""Tuner: `lr_find`, `scale_batch_size` and `throughput`, which train copies and leave the originals unchanged."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from trainer.data.datamodule import DataModule
from trainer.errors import ConfigError, did_you_mean
from trainer.loop.setup import start_processes
from trainer.model.memory_limit import limited_memory, memory_of_trial
from trainer.module import TrainModule
from trainer.trainer import Trainer
from trainer.tuner.batch_size import AgreedStopwatch, BatchSizes, Stopwatch, check_search, check_several, search
from trainer.tuner.lr_finder import Losses, LRFinder, Rates, check_range
from trainer.tuner.throughput import Setting, Throughput, apply, search_settings, settings_to_try, with_options
from trainer.tuner.trial import loader_like, run_trial

log = logging.getLogger("trainer")


class Tuner:
    """Finds a learning rate, a batch size, or faster settings for a trainer.

    Each trial trains copies of the module and the data module, without the trainer's callbacks, loggers and
    checkpoints, so that weights, random numbers, counters and callbacks stay unchanged. Only the attribute that
    was searched for is set.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.batch_sizes: BatchSizes | None = None
        """Sizes that the last `scale_batch_size` has tried, with their samples per second."""

    def lr_find(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Literal["fit"] = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFinder:
        """Train with many learning rates, and return the curve, whose `suggestion()` is a learning rate that trains.

        One training has a learning rate that grows from step to step; some with constant rates follow, see `LRFinder`.
        Together they take about five times `num_training` steps, and more where the losses vary much.

        Args:
            model: the module.
            train_dataloaders: the training data; default: the data module's or the module's.
            val_dataloaders, dataloaders: not used.
            datamodule: provides the training data instead.
            method: "fit".
            min_lr, max_lr: the first and the last learning rate.
            num_training: steps from one to the other; half as many with each constant rate.
            mode: whether the learning rate grows by a factor or by an amount.
            early_stop_threshold: end the growth when the loss is so many times the lowest one; None: do not.
            update_attr: set the module's (or its hparams') attribute to the suggestion.
            attr_name: that attribute; default: `lr` or `learning_rate`, whichever there is.

        Raises:
            ConfigError: an argument has a wrong value, or there is no such attribute.
        """
        check_range(method, min_lr, max_lr, num_training, mode)
        attribute = _Attribute(model, datamodule, (attr_name,) if attr_name else ("lr", "learning_rate"))
        if attr_name and update_attr and not attribute.name:
            close = did_you_mean(attr_name, [*vars(model), *model.hparams])
            raise ConfigError(f"lr_find({attr_name=}): neither {type(model).__name__} nor its hparams has it.{close}")
        if not model.automatic_optimization:
            raise ConfigError("lr_find needs automatic optimization, and this module optimizes by hand.")
        finder = LRFinder(mode, min_lr, max_lr, num_training)

        def attempt(rates: Rates) -> Losses:
            run_trial(self._trainer.settings, model, train_dataloaders, datamodule, rates, len(rates.rates))
            return rates.losses

        finder.search(attempt, early_stop_threshold)
        found = finder.suggestion()
        if finder.stopped:
            log.warning("lr_find: %s", finder.stopped)
        if found is not None and update_attr:
            attribute.set(found)
            log.info("learning rate: %.3g (set attribute: %s)", found, attribute.name or None)
        return finder

    def scale_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Literal["fit"] = "fit",
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        memory_limit: int | None = None,
    ) -> int | None:
        """Return the largest batch size, for each process, that fits into the memory; None if not even one sample does.

        Logs the samples per second of each size, and the size above which they grow by less than 5 %; they are in
        `batch_sizes`. Sizes above the number of samples are not tried. On several processes all try the same size, and
        it fits if it does on each of them; the samples per second are the sum of all.

        Args:
            model, val_dataloaders, dataloaders, datamodule, method: as in `lr_find`.
            train_dataloaders: a DataLoader; each trial gets one like it. Default: the loader of the data
                module or the module, made with its attribute `batch_arg_name`.
            mode: "power" doubles the size until the memory is used up; "binsearch" then also tries sizes between.
            steps_per_trial: steps of each trial; the first is not measured.
            init_val: the first size.
            max_trials: trials at most.
            batch_arg_name: the attribute of the module, the data module or their hparams.
            margin: with "binsearch", the part to subtract from the largest size that fits.
            max_val: the largest size to try.
            memory_limit: on CPUs, bytes of memory that a trial may take, on each process; default: nine tenths of
                what is free, split among the processes.

        Raises:
            ConfigError: an argument has a wrong value, or nothing has the attribute.
        """
        check_search(method, mode, steps_per_trial, init_val, max_trials, max_val, margin)
        trainer = self._trainer
        several = trainer.config.num_processes > 1
        if several:
            check_several(trainer.config, model)
            start_processes(trainer.config)
        attribute = _Attribute(model, datamodule, (batch_arg_name,) if train_dataloaders is None else ())
        if train_dataloaders is None and not attribute.name:
            raise ConfigError(
                f"scale_batch_size(batch_arg_name={batch_arg_name!r}): neither the module nor the data module has it. "
                "Set it in __init__ and use it in train_dataloader, or give a DataLoader as train_dataloaders."
            )
        most = min(max_val, _samples(train_dataloaders, trainer.config.num_processes) or max_val)
        limit = None
        if trainer.config.device_type == "cpu":
            limit = memory_of_trial() if memory_limit is None else memory_limit

        def attempt(size: int) -> float:
            watch = AgreedStopwatch(limit) if several else Stopwatch()
            loader = train_dataloaders
            if loader is not None:
                loader = loader_like(loader, batch_size=size, drop_last=True)
            attribute.set(size)
            given: dict[str, Any] = {"accumulate_grad_batches": "auto"} if several else {}
            with limited_memory(None if several else limit):
                run_trial(trainer.settings, model, loader, datamodule, watch, steps_per_trial, **given)
            return watch.samples_per_second(size)

        with attribute.restored():
            self.batch_sizes = found = search(attempt, mode, init_val, max_trials, most, margin)
        if found.chosen is None:
            log.warning("scale_batch_size: not even one sample fits into the memory")
            return None
        attribute.set(found.chosen)
        words = "batch sizes:\n%s\nthe largest: %d; above %s, the samples per second grow by less than 5 %%"
        log.info(words, found.table(), found.chosen, found.worthwhile)
        return found.chosen

    def throughput(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        steps_per_trial: int = 20,
    ) -> Throughput:
        """Return the samples per second with the present settings, and with others that may be faster.

        Tried are workers of the DataLoader, pinned memory, larger micro-batches, a fused optimizer, compilation and
        bf16-mixed, each alone; on one process, also all that give 5 % more together. Nothing is changed.

        Args:
            model, train_dataloaders, datamodule: as in `lr_find`.
            steps_per_trial: steps of each trial; the first is not measured.

        Raises:
            ConfigError: `steps_per_trial` is below 2, the present settings do not train, or all steps but the first
                compile.
        """
        if type(steps_per_trial) is not int or steps_per_trial < 2:
            raise ConfigError(f"throughput({steps_per_trial=}): give an integer from 2.")
        settings, config = self._trainer.settings, self._trainer.config

        def attempt(tried: Setting) -> float:
            watch, loader = Stopwatch(), train_dataloaders
            if loader is not None and tried.loader:
                loader = with_options(loader, tried.loader)
            prepare = partial(apply, tried)
            run_trial(settings, model, loader, datamodule, watch, steps_per_trial, prepare, **tried.arguments)
            if not watch.seconds:
                raise ConfigError("no step is left to measure without compilation: give more steps_per_trial (--steps)")
            return watch.samples / watch.seconds

        return search_settings(attempt, settings_to_try(settings, config.device_type), config.num_processes == 1)


class _Attribute:
    """The attribute to set: the first of the names that the module, the data module or their hparams have."""

    def __init__(self, model: TrainModule, datamodule: DataModule | None, names: Sequence[str]) -> None:
        users: list[Any] = [model] if datamodule is None else [model, datamodule]
        places = [place for user in users for place in (user, user.hparams)]
        self.name = next((name for name in names if any(hasattr(place, name) for place in places)), "")
        self.places = [place for place in places if hasattr(place, self.name)]

    def set(self, value: Any) -> None:
        for place in self.places:
            setattr(place, self.name, value)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the values at the end of the block."""
        before = [(place, getattr(place, self.name)) for place in self.places]
        try:
            yield
        finally:
            for place, value in before:
                setattr(place, self.name, value)


def _samples(loader: Any, processes: int) -> int | None:
    """Return the number of samples of a DataLoader that was given, for each process; None: unknown."""
    try:
        return len(loader.sampler) // processes
    except (AttributeError, TypeError):
        return None
