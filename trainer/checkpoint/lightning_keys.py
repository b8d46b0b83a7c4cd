"""Lightning's keys of a checkpoint, in the hooks that get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lightning_keys(checkpoint: dict[str, Any]) -> Iterator[None]:
    """Show entries of a checkpoint under Lightning's keys, too, in the hooks that get it; "state_dict" may be replaced.

    "state_dict" is the entry "model"; the other keys are for reading.
    """
    progress = checkpoint.get("progress", {})
    shown = {
        "state_dict": checkpoint["model"],
        "epoch": progress.get("epoch", 0),
        "global_step": progress.get("step", 0),
        "hyper_parameters": checkpoint.get("hyperparameters", {}).get("module", {}),
        "optimizer_states": checkpoint.get("optimizers", []),
        "lr_schedulers": checkpoint.get("schedulers", []),
    }
    shown = {name: value for name, value in shown.items() if name not in checkpoint}
    checkpoint.update(shown)
    yield
    for name in shown:
        value = checkpoint.pop(name, None)
        if name == "state_dict" and value is not None and checkpoint["model"] is shown[name]:
            checkpoint["model"] = value
