"""The checkpoint that users' hooks get: also under Lightning's keys, with the hooks' entries kept separate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ADDED = "added"
"""The entry with what hooks have added. Earlier versions stored these entries beside the trainer's."""


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
            "hyper_parameters": entries.get("hyperparameters", {}).get("module", {}),
            "optimizer_states": entries.get("optimizers", []),
            "lr_schedulers": entries.get("schedulers", []),
        }
        own = {name: value for name, value in entries.items() if name != ADDED}
        self._shown = {**lightning, **own, **entries.get(ADDED, {})}
        super().__init__(self._shown)

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


@contextmanager
def loaded_by_hooks(entries: dict[str, Any]) -> Iterator[HookCheckpoint]:
    """Give hooks the entries that were read; the hooks may replace the trainer's entries."""
    yield (checkpoint := HookCheckpoint(entries))
    added = entries.get(ADDED, {})
    entries.update({name: value for name, value in checkpoint.changed().items() if name not in added})
