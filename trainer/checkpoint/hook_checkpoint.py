"""The checkpoint that users' hooks get: also under Lightning's keys, with the hooks' entries kept separate."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from trainer.checkpoint.serialization import serialize
from trainer.errors import CheckpointError
from trainer.names.states import runs_as_lightning

log = logging.getLogger("trainer")

ADDED = "added"
"""The entry with what hooks have added. Earlier versions stored these entries beside the trainer's."""


HYPERPARAMETERS = "hyper_parameters"
"""Lightning's entry with the module's hyperparameters."""
_reported: set[str] = set()
"""The names of objects that a warning has named."""


class HookCheckpoint(dict[str, Any]):
    """The entries of a checkpoint, some of them under Lightning's keys, too, and what hooks have added.

    "state_dict" is the entry "model", and may be replaced by another dict; Lightning's other keys are for reading.
    """

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries
        """The trainer's entries, which a key of a hook does not replace."""
        progress = entries.get("progress", {})
        lightning = {
            "state_dict": entries["model"],
            "epoch": progress.get("epoch", 0),
            "global_step": progress.get("step", 0),
            HYPERPARAMETERS: entries.get("hyperparameters", {}).get("module", {}),
            "optimizer_states": entries.get("optimizers", []),
            "lr_schedulers": entries.get("schedulers", []),
        }
        own = {name: value for name, value in entries.items() if name != ADDED}
        self._shown = {**lightning, **own, **entries.get(ADDED, {})}
        self.objects: dict[str, Any] = {}
        """The additions of hooks that the folder of a checkpoint cannot store, in a process that runs as Lightning."""
        super().__init__(self._shown)

    def __missing__(self, name: str) -> Any:
        why = "; an object in a file is read with weights_only=False only" if runs_as_lightning() else ""
        raise KeyError(f"{name}{why}")

    def changed(self) -> dict[str, Any]:
        """Return what hooks have replaced or added; weights that they have replaced go into the entry "model"."""
        changed = {name: value for name, value in self.items() if value is not self._shown.get(name, self)}
        for name in ("model", "state_dict"):
            new, weights = changed.get(name), self.entries["model"]
            is_weights = isinstance(new, dict) and (name == "state_dict" or not weights or new.keys() & weights.keys())
            if is_weights and name not in self.entries.get(ADDED, {}):
                self.entries["model"] = changed.pop(name)
        return changed


def entries_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the trainer's entries of a checkpoint that a hook was given."""
    return checkpoint.entries if isinstance(checkpoint, HookCheckpoint) else checkpoint


@contextmanager
def saved_by_hooks(entries: dict[str, Any]) -> Iterator[HookCheckpoint]:
    """Give hooks the entries to be written, and keep what they add separate."""
    yield (checkpoint := HookCheckpoint(entries))
    if changed := checkpoint.changed():
        entries[ADDED] = changed
    if runs_as_lightning():
        checkpoint.objects = _take_objects(entries)


def _take_objects(entries: dict[str, Any]) -> dict[str, Any]:
    """Remove what hooks have added and a checkpoint cannot store; return copies by name, with their moment's state.

    Hyperparameters that a hook has added are in a dict of their own, under Lightning's key.
    """
    objects = _taken(entries.get(ADDED, {}))
    if of_module := _taken(entries.get("hyperparameters", {}).get("module", {})):
        objects[HYPERPARAMETERS] = {**objects.get(HYPERPARAMETERS, {}), **of_module}
    if new := {*objects, *of_module} - {HYPERPARAMETERS} - _reported:
        _reported.update(new)
        log.warning(
            "on_save_checkpoint adds %s, which are not data: single files contain them, the folders of checkpoints do "
            "not",
            ", ".join(sorted(new)),
        )
    return objects


def _taken(values: dict[str, Any]) -> dict[str, Any]:
    objects = {name: values.pop(name) for name in [*values] if not is_data(values[name])}
    for name, value in objects.items():
        with suppress(Exception):  # what cannot be copied may change until it is written
            objects[name] = copy.deepcopy(value)
    return objects


def is_data(value: Any) -> bool:
    """Whether a checkpoint can store a value."""
    try:
        serialize(value, "value")
    except CheckpointError:
        return False
    return True


def with_objects(entries: dict[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a file in Lightning's shape, with objects."""
    hyperparameters = {**entries.get(HYPERPARAMETERS, {}), **objects.get(HYPERPARAMETERS, {})}
    return {**entries, **objects, HYPERPARAMETERS: hyperparameters}


def add_objects(entries: dict[str, Any], objects: Mapping[str, Any]) -> None:
    """Add what only the file of a checkpoint has to the entries that its folder has."""
    added = {name: value for name, value in objects.items() if name != HYPERPARAMETERS}
    entries[ADDED] = {**added, **entries.get(ADDED, {})}
    kept = entries.setdefault("hyperparameters", {})
    kept["module"] = {**objects.get(HYPERPARAMETERS, {}), **kept.get("module", {})}


@contextmanager
def loaded_by_hooks(entries: dict[str, Any]) -> Iterator[HookCheckpoint]:
    """Give hooks the entries that were read; the hooks may replace the trainer's entries."""
    yield (checkpoint := HookCheckpoint(entries))
    added = entries.get(ADDED, {})
    entries.update({name: value for name, value in checkpoint.changed().items() if name not in added})
