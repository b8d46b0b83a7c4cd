"""Return the name here for one of Lightning's, or what to use instead, from the table of Lightning's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import trainer
from trainer.cli.migrate import former_names
from trainer.compat import answers, names
from trainer.compat.finder import flag
from trainer.compat.names import MODULES
from trainer.config.plug_names import callbacks
from trainer.metrics.monitor import implied_mode
from trainer.names import misses

NAMES = {**former_names.NAMES, **names.NAMES}
"""Names of all versions, as in `compat.names.NAMES`."""

ROOTS = {
    "lightning.pytorch": "trainer",
    "lightning.fabric": "trainer.fabric",
    "lightning": "trainer",
    "pytorch_lightning": "trainer",
    "lightning_fabric": "trainer.fabric",
    "lightning_lite": "trainer.lite",
    "lightning_utilities.core.rank_zero": "trainer.utilities.rank_zero",  # its rank is set by Lightning's import
}
"""Lightning's packages -> what they are here; the longer names first."""

RENAMED = {"LightningModule": "TrainModule", "LightningDataModule": "DataModule"}
"""Classes that are called something else here."""

ARGUMENTS: dict[str, dict[str, str]] = {
    "Trainer": {
        "replace_sampler_ddp": "use_distributed_sampler",
        "default_save_path": "default_root_dir",
        "show_progress_bar": "enable_progress_bar",
        "log_save_interval": "log_every_n_steps",
        "row_log_interval": "log_every_n_steps",
        "train_percent_check": "limit_train_batches",
        "val_percent_check": "limit_val_batches",
        "test_percent_check": "limit_test_batches",
        "nb_gpu_nodes": "num_nodes",
        "nb_sanity_val_steps": "num_sanity_val_steps",
        "max_nb_epochs": "max_epochs",
        "min_nb_epochs": "min_epochs",
        "overfit_pct": "overfit_batches",
        "gradient_clip": "gradient_clip_val",
    },
    "ModelCheckpoint": {"period": "every_n_epochs", "every_n_val_epochs": "every_n_epochs"},
    "fit": {"train_dataloader": "train_dataloaders", "val_dataloader": "val_dataloaders"},
    "validate": {"val_dataloaders": "dataloaders"},
    "test": {"test_dataloaders": "dataloaders"},
}
"""Lightning's class, or method of a Trainer -> an argument of an earlier version -> its name now, with the same values.
"""

VALUES: dict[tuple[str, str], tuple[str, str]] = {
    ("checkpoint_callback", "True"): ("enable_checkpointing", "True"),
    ("checkpoint_callback", "False"): ("enable_checkpointing", "False"),
    ("profiler", "True"): ("profiler", "'simple'"),
    ("profiler", "False"): ("profiler", "None"),
    ("weights_summary", "None"): ("enable_model_summary", "False"),
    ("progress_bar_refresh_rate", "0"): ("enable_progress_bar", "False"),
    ("reload_dataloaders_every_epoch", "True"): ("reload_dataloaders_every_n_epochs", "1"),
    ("reload_dataloaders_every_epoch", "False"): ("reload_dataloaders_every_n_epochs", "0"),
    ("gradient_clip_val", "0"): ("gradient_clip_val", "None"),
    ("gradient_clip_val", "0.0"): ("gradient_clip_val", "None"),
    ("gpus", "None"): ("accelerator", "'cpu'"),
    ("gpus", "0"): ("accelerator", "'cpu'"),
    **{
        (name, value): ("strategy", value)
        for name in ("accelerator", "distributed_backend")
        for value in ("'ddp'", '"ddp"', "'fsdp'", '"fsdp"')
    },
}
"""An argument of Trainer and its value -> those that mean the same here."""

NOT_THERE = {
    "metrics": "torchmetrics, which these metrics have become",
    "data": "litdata, which this package has become",
    "apps": "nothing: apps are not here",
    "store": "nothing: the model store is not here",
    "__about__": "trainer.__version__, or importlib.metadata for the rest",
}
"""Packages of Lightning's that are neither here nor in the table -> what to use instead."""

PUBLIC = ("trainer.callbacks", "trainer.strategies", "trainer.tuner")
"""Packages whose names are written with their own paths."""

NAME_HERE = re.compile(r"([^ ]*:[^ ]*)?")
"""A target of NAMES that is a module and a name, or empty, and not advice."""

UNKNOWN = "one of the names of docs/lightning-names.md: this one is not here"


class Finding(NamedTuple):
    """A place that a person must decide about."""

    line: int
    what: str
    todo: str


class Place(NamedTuple):
    """A place here of a name or module of Lightning's, or what to use instead."""

    path: str
    """The dotted path here; empty if nothing of that name is here."""
    instead: str = ""
    """The replacement of a name that is not here."""


def argument_words(kind: str, name: str, value: object) -> str | None:
    """Return what to use instead of an argument of the constructor of Lightning's class; None: it may stay.

    Args:
        value: what it is given; an ellipsis if that is not known.
    """
    words = {**former_names.ARGUMENTS.get(kind, {}), **answers.argument_words(kind)}.get(name)
    if words is None or misses.is_default(kind, name, value):
        return None
    return "nothing: leave it out" if value is None else words


def mode_words(kind: str, given: Mapping[str, object]) -> str | None:
    """Return what to give for the mode of a callback; None: it may stay, or is not known."""
    expected = implied_mode(str(given.get("monitor")))
    is_taken = given.get("mode", expected) in (("min", "max", ...) if "mode" in given else ("min", None))
    is_monitor = kind in ("ModelCheckpoint", "EarlyStopping")
    return "mode='max', or mode='min' if smaller is better" if is_monitor and not is_taken else None


def lightning_root(path: str) -> str | None:
    """Return the package of Lightning's that a dotted path belongs to; None for other paths."""
    return next((root for root in ROOTS if f"{path}.".startswith(f"{root}.")), None)


def module_here(path: str) -> Place:
    """Return what became of one of Lightning's modules."""
    root = lightning_root(path)
    assert root is not None
    inside = (ROOTS[root] + path.removeprefix(root)).partition(".")[2]
    package = inside.partition(".")[0]
    if package in NOT_THERE:
        return Place("", NOT_THERE[package])
    while inside in former_names.MODULES.split():  # its names are found in the package that it was in
        inside = inside.rpartition(".")[0]
    if not inside:
        return Place("trainer")
    return Place(f"trainer.{inside}") if inside in MODULES or _is_a_file(inside) else Place("", UNKNOWN)


def _is_a_file(inside: str) -> bool:
    place = Path(trainer.__file__).parent.joinpath(*inside.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def name_here(module: str, name: str) -> Place:
    """Return what became of the name `name` of Lightning's module `module`."""
    served = module_here(f"{module}.{name}")
    if served.path:
        return served
    inside = module_here(module)
    known = RENAMED.get(name, name)
    target = NAMES.get(f"{inside.path.partition('.')[2]}.{name}", NAMES.get(known, ""))
    if not NAME_HERE.fullmatch(target):
        return Place("", target)
    packages = [
        ("trainer", known in trainer.__all__),
        *((package, target == f"{package}:{known}") for package in PUBLIC),
        (inside.path or "trainer.utilities", target != "" or flag(name) is not None),  # Lightning's path is served
        ("trainer.loggers", known in callbacks("Logger")),
        ("trainer.callbacks", known in callbacks("Callback")),
    ]
    home = next((package for package, has_it in packages if has_it), None)
    return Place("", inside.instead or UNKNOWN) if home is None else Place(f"{home}.{known}")


def name_words(owner: str, name: str) -> str:
    """Return what to use instead of a name of Lightning's module or class; empty if it is here, or not known."""
    inside = owner.partition(".")[2]
    if owner.startswith("trainer.") and inside in MODULES and not _is_a_file(inside):
        owner = f"lightning.pytorch.{inside}"  # rewritten before
    if lightning_root(owner) and module_here(owner).path:
        here = name_here(owner, name)
        return "" if here.path or name.startswith("__") else here.instead
    target = NAMES.get(name, "")
    return "" if NAME_HERE.fullmatch(target) else target
