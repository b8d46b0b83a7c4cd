"""Find the run that "last" or "best" means in a command: by its name, or by what it trains and how it begins."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.arguments import local_path
from trainer.checkpoint.directory import POINTERS, versions
from trainer.config.check import missing_arguments
from trainer.config.files import to_yaml
from trainer.config.loading import Recipe, checkpoint_of, record_of
from trainer.config.tree import mapped, relative
from trainer.errors import ConfigError, first_of
from trainer.runs.compare_ranks import listed
from trainer.settings import ARGUMENTS, Settings

_CHOICES = ("module", "data", "optimizer", "lr_scheduler")
_SHOWN = 5
"""Runs, and differences of each, that a message lists."""
_DEFAULTS = {name: getattr(Settings, name, None) for name in ARGUMENTS}


def choose_run(configuration: Recipe, files: Iterable[str], command: str) -> Iterator[str]:
    """Have the command work in the run that it means, and yield a line that names it where that is not said.

    It is the run whose own configuration is among the files, or, for "last" and "best", of the runs below
    `default_root_dir` that have a checkpoint the one with the command's name, or, without one, with its module, data,
    optimizer, lr_scheduler and their values, its seed, and its weights if it names any: of several that with the
    fewest other settings of the trainer, of these the newest. Runs that scripts have started have no configuration: of
    these it is the newest.

    Raises:
        ConfigError: two runs are meant, or none of those that there are; lists them with what differs.
    """
    which, name = configuration.ckpt_path, configuration.name
    named = _in_named_run(configuration, files, command)
    if which not in POINTERS:
        return
    if named is not None:
        if checkpoint_of(named, "last"):
            yield f"--ckpt-path {which} is taken from {relative(named)}"
        return
    root = local_path(configuration.trainer.get("default_root_dir", Settings.default_root_dir))
    records = {
        run: record
        for run in reversed(versions(root))
        if "module" in (record := record_of(run)) and name in (None, record.get("name")) and checkpoint_of(run, "last")
    }
    if records:
        yield _choose(configuration, command, records, root)
    else:
        yield from _without_runs(configuration, command, root)


def _without_runs(configuration: Recipe, command: str, root: Path) -> Iterator[str]:
    """Begin a training; or take the newest checkpoint of those that scripts have written, if no name is asked for."""
    name, begins = configuration.name, (command, configuration.ckpt_path) == ("fit", "last")
    if name is not None and not begins:
        raise ConfigError(f"--name {name}: no run below {relative(root)} has this name and a checkpoint.")
    if name is not None:
        configuration.ckpt_path = None
    if name is not None or (begins and not versions(root)):
        yield f"there is no such run below {relative(root)} yet: the training begins"
    elif command != "fit":
        for run in reversed(versions(root)):
            if configuration.take_checkpoint(run):
                break


def _choose(configuration: Recipe, command: str, records: dict[Path, dict[str, Any]], root: Path) -> str:
    """Have the command work in the nearest of the runs, whose `records` begin with the newest; return a line on it."""
    which = configuration.ckpt_path
    wanted = yaml.safe_load(configuration.recorded)
    found = {run: [*_differences(configuration, record, wanted)] for run, record in records.items()}
    equal = [run for run, lines in found.items() if configuration.name is not None or not lines]
    if not equal and (command == "fit" or len(found) > 1):
        raise ConfigError(_none_is_equal(configuration, command, found, root))
    run = min(equal or found, key=lambda one: _other_settings(records[one], wanted))
    configuration.work_in(run, command)
    if (command, which) == ("fit", "last"):  # the run keeps its name and its first weights
        kept = {key: records[run][key] for key in ("name", "weights") if key in records[run]}
        configuration.recorded = to_yaml({**kept, **wanted})
    differs = f", although it has {'; '.join(found[run][:_SHOWN])}" if found[run] else ""
    return f"--ckpt-path {which} is taken from {relative(run)}{differs}"


def _in_named_run(configuration: Recipe, files: Iterable[str], command: str) -> Path | None:
    """Return the run whose own configuration is among the files, wherever it was moved to, and work in it."""
    which, given = configuration.ckpt_path, map(local_path, files)
    folders = dict.fromkeys(file.absolute().parent for file in given if file.name == "config.yaml")
    runs = [*filter(_is_run, folders)]
    other_name = len(runs) == 1 and configuration.name not in (None, record_of(runs[0]).get("name"))
    if which in POINTERS and (len(runs) > 1 or other_name):
        raise ConfigError(
            f"--ckpt-path {which} is ambiguous: --name and the configurations of {first_of(runs)} mean several runs. "
            "Give one configuration without --name, or --ckpt-path FOLDER."
        )
    if len(runs) != 1:
        return None
    source = configuration.sources.get("default_root_dir")
    if source is not None and source.folder == runs[0]:
        configuration.trainer["default_root_dir"] = str(runs[0].parent)
    configuration.work_in(runs[0], command)
    return runs[0]


def _none_is_equal(configuration: Recipe, command: str, found: dict[Path, list[str]], root: Path) -> str:
    lines = [f"{relative(run)}: {'; '.join(differs[:_SHOWN])}" for run, differs in found.items()]
    config, which = relative(next(iter(found)) / "config.yaml"), configuration.ckpt_path
    return (
        f"--ckpt-path {which}: no run below {relative(root)} has the module, data, optimizer and seed of this command, "
        f"with their values.{listed(lines, _SHOWN)}\nTo take one of them: trainer {command} --config "
        f"{shlex.quote(config)} --ckpt-path {which}. To begin a training, leave out --ckpt-path, or add --name NAME."
    )


def _is_run(folder: Path) -> bool:
    """Whether a folder with a configuration is a run: it has checkpoints, or lies where its configuration says."""
    place = record_of(folder)["trainer"].get("default_root_dir")
    at_its_place = place == str(folder.parent) and folder in versions(folder.parent)
    return at_its_place or checkpoint_of(folder, "last") is not None


def _differences(configuration: Recipe, record: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between a run's configuration and the command's, with the values that were written."""
    there, here = _compared(record), _compared(wanted)
    module = configuration.module
    of_checkpoint = {f"module.{name}" for name in missing_arguments(module.cls, module.arguments)}
    for name in sorted((there.keys() | here.keys()) - of_checkpoint):
        before, now = there.get(name, "nothing"), here.get(name, "nothing")
        if before != now and plain(before, _root(record)) != plain(now, _root(wanted)):
            yield f"{name} {before} there, {now} here"
    if wanted.get("weights") and record.get("weights") != wanted["weights"]:
        yield f"weights {record.get('weights')} there, {wanted['weights']} here"


def _root(record: dict[str, Any]) -> str:
    return str(record["trainer"].get("default_root_dir", "."))


def _compared(record: dict[str, Any]) -> dict[str, Any]:
    """Return the seed, the classes and their arguments, by names such as `module` and `module.lr`."""
    values = {"trainer.seed": record["trainer"].get("seed")}
    for key in _CHOICES:
        chosen = record.get(key)
        chosen = chosen if isinstance(chosen, dict) else {"class_path": chosen}
        values[key] = chosen.get("class_path")
        values |= {f"{key}.{name}": value for name, value in (chosen.get("init_args") or {}).items()}
    return values


def _other_settings(record: dict[str, Any], wanted: dict[str, Any]) -> int:
    """Return the number of the trainer's settings that differ, apart from the folder; the weights count as one."""
    there, here = ({**_DEFAULTS, **one["trainer"], "weights": one.get("weights")} for one in (record, wanted))
    names = (there.keys() | here.keys()) - {"default_root_dir"}
    return sum(there.get(name) != here.get(name) for name in names)


def plain(value: Any, root: str) -> Any:
    """Return a value as a file has it, with paths (also of classes) relative to the runs, which move with a project."""
    return mapped(value, lambda one: _relative_to(root, one))


def _relative_to(root: str, value: Any) -> Any:
    if isinstance(value, Path):
        value = str(value.absolute())
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    # /folder:module.Class is /folder/module.py:Class
    value = re.sub(r"^(/[^:]*):([\w.]+)\.(\w+)$", lambda at: f"{at[1]}/{at[2].replace('.', '/')}.py:{at[3]}", value)
    return os.path.relpath(value, root)
