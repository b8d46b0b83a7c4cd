"""Search for settings with more samples per second: each alone, then all that pay together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, TrainerError
from trainer.model.memory_limit import is_out_of_memory, release_memory
from trainer.tuner.batch_size import LEAST_GROWTH
from trainer.tuner.trial import loader_like

if TYPE_CHECKING:
    from trainer.data.datamodule import DataModule
    from trainer.module import TrainModule
    from trainer.settings import Settings

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch that have a fused step."""


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting to try."""

    name: str
    """The setting as the user types it."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer."""
    loader: dict[str, Any] = field(default_factory=dict)
    """Arguments of the DataLoader."""
    fused: bool = False
    note: str = ""
    """A consequence for the user to know; empty: none."""


@dataclass
class Throughput:
    """The samples per second of settings."""

    baseline: float
    """Samples per second of the present settings: the better of two trials, before and after the others."""
    found: dict[Setting, float] = field(default_factory=dict)
    failed: dict[Setting, str] = field(default_factory=dict)
    pays: list[Setting] = field(default_factory=list)
    """The settings with at least 5 % more samples per second, of each argument the best one."""

    def table(self) -> str:
        """Return a line for each setting, the fastest first."""
        lines = [f"{PRESENT.name:<34}{self.baseline:>12,.0f} samples/s"]
        for setting, speed in sorted(self.found.items(), key=lambda item: -item[1]):
            note = f"   ({setting.note})" if setting.note else ""
            lines.append(f"{setting.name:<34}{speed:>12,.0f} samples/s  {speed / self.baseline - 1:>+5.0%}{note}")
        lines += [f"{setting.name:<34}{'-':>12}            {why}" for setting, why in self.failed.items()]
        return "\n".join(lines)


def settings_to_try(present: Settings, device_type: str) -> Iterator[Setting]:
    """Yield settings that differ from the present ones, for a type of device."""
    cores = os.cpu_count() or 1
    for workers in sorted({0, 1, 2, 4, 8}.intersection(range(cores)) | {cores}):
        yield Setting(f"num_workers={workers}", loader={"num_workers": workers, "persistent_workers": workers > 0})
    if device_type == "cuda":
        yield Setting("pin_memory=True", loader={"pin_memory": True})
    for factor in (2, 4):
        note = f"divide accumulate_grad_batches by {factor} for the same steps"
        yield Setting(f"batch_size x {factor}", loader={"batch_size": factor}, note=note)
    yield Setting("fused=True in the optimizer", fused=True)
    if present.compile is False:
        yield Setting("compile=True", arguments={"compile": True})
    if present.precision == "32-true":
        yield Setting('precision="bf16-mixed"', arguments={"precision": "bf16-mixed"}, note="other numbers")


PRESENT = Setting("unchanged")
"""The present settings."""


def search_settings(attempt: Callable[[Setting], float], settings: Iterator[Setting], combine: bool) -> Throughput:
    """Measure each setting alone, and all that pay together, with `attempt`, which returns samples per second."""
    found = Throughput(attempt(PRESENT))
    for setting in settings:
        _measure(found, attempt, setting)
    found.baseline = max(found.baseline, attempt(PRESENT))
    best: dict[tuple[str, ...], Setting] = {}
    for setting, speed in sorted(found.found.items(), key=lambda item: item[1]):
        if speed >= LEAST_GROWTH * found.baseline:
            best[*setting.arguments, *(name for name in setting.loader if name != "persistent_workers")] = setting
    found.pays = [*best.values()]
    if combine and len(best) > 1:
        _measure(found, attempt, together(found.pays))
    return found


def together(settings: list[Setting]) -> Setting:
    """Return one setting in place of several."""
    arguments: dict[str, Any] = {}
    loader: dict[str, Any] = {}
    for setting in settings:
        arguments |= setting.arguments
        loader |= setting.loader
    name = " + ".join(setting.name for setting in settings)
    return Setting(name, arguments, loader, any(setting.fused for setting in settings))


def _measure(found: Throughput, attempt: Callable[[Setting], float], setting: Setting) -> None:
    """Add the samples per second with a setting, or the reason why it cannot train."""
    try:
        found.found[setting] = attempt(setting)
        return
    except TrainerError as error:
        found.failed[setting] = str(error).splitlines()[0][:100]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found.failed[setting] = "out of memory"
    release_memory()


def apply(setting: Setting, module: TrainModule, datamodule: DataModule | None) -> None:
    """Have the module and the data module of a trial make their loader and optimizers with the setting."""
    owner: Any = datamodule if datamodule is not None and datamodule.overrides("train_dataloader") else module
    if setting.loader and owner.overrides("train_dataloader"):
        make = owner.train_dataloader
        owner.train_dataloader = lambda: with_options(make(), setting.loader)
    if setting.fused:
        configure = module.configure_optimizers
        module.configure_optimizers = lambda: fused(configure())  # type: ignore[method-assign]


def with_options(loader: Any, changes: dict[str, Any]) -> Any:
    """Return a copy of a DataLoader with other options; `batch_size` is a factor.

    Raises:
        ConfigError: the loader is not a plain DataLoader, has the options already, or lacks a batch size.
    """
    if "batch_size" in changes:
        changes = {**changes, "batch_size": changes["batch_size"] * (getattr(loader, "batch_size", None) or 1)}
    elif all(getattr(loader, name, None) == value for name, value in changes.items()):
        raise ConfigError("the loader has it already")
    return loader_like(loader, **changes)


def fused(optimizers: Any) -> Any:
    """Set `fused` in the optimizers of torch that have a fused step.

    Raises:
        ConfigError: no optimizer has a fused step, or one is fused already.
    """
    every = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    known = [one for one in every if type(one).__module__.startswith("torch.optim") and type(one).__name__ in FUSED]
    if not known:
        raise ConfigError("the optimizer has no fused step")
    for group in chain.from_iterable(optimizer.param_groups for optimizer in known):
        if group.get("fused"):
            raise ConfigError("the optimizer is fused already")
        group["fused"], group["foreach"] = True, False
    return optimizers
