"""Reading the checkpoint of a run: what a Trainer writes has to be there, and be of its kind."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trainer.checkpoint.format import open_checkpoint, read_checkpoint
from trainer.checkpoint.place import Place
from trainer.checkpoint.together import ALONE, Peers
from trainer.errors import CheckpointError
from trainer.progress import Progress

KINDS: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "optimizers": (list,),
    "schedulers": (list,),
    "scaler": (dict,),
    "progress": (dict,),
    "rng": (list,),
    "loader": (list,),
    "metrics": (list,),
    "callback_metrics": (dict,),
    "callbacks": (dict,),
    "data": (dict,),
    "hyperparameters": (dict,),
    "config": (str, type(None)),
    "seed": (int,),
    "run_dir": (str,),
    "world_size": (int,),
    "strategy": (str,),
    "precision": (str,),
    "versions": (dict,),
}
"""What `trainer.checkpoint.content.collect` gives, as far as reading relies on it; there may be more."""

PER_PROCESS = ("rng", "loader", "metrics")


DIVIDED = ("model", "optimizers")
"""Keys whose tensors may be divided among processes, because none has room for the whole."""


def read_run(path: str | Place, verify: bool = True, divided: bool = False, peers: Peers = ALONE) -> dict[str, Any]:
    """As `read_checkpoint`, of one that a Trainer wrote.

    Args:
        path: the checkpoint's folder.
        verify: check the hashes of its files.
        divided: leave the tensors of `DIVIDED` in the files, as `StoredTensor`s; the `peers` all call this, and share
            the work of verifying.

    Raises:
        CheckpointError: it cannot be read; or something is missing in it, or is not what a Trainer writes.
    """
    checkpoint = open_checkpoint(path, DIVIDED, verify, peers) if divided else read_checkpoint(path, verify=verify)
    problems = []
    for name, kinds in KINDS.items():
        if name not in checkpoint:
            problems.append(f"it has no {name!r}")
        elif type(checkpoint[name]) not in kinds:
            problems.append(f"{name!r} is a {type(checkpoint[name]).__name__}")
    if not problems:
        problems = _wrong_counters(checkpoint["progress"]) + _wrong_lengths(checkpoint)
    if problems:
        raise CheckpointError(
            f"{path} is not that of a training, or of another version of this package: {'; '.join(problems)}. For the "
            "weights alone: load_from_checkpoint, or trainer checkpoint export."
        )
    return checkpoint


def _wrong_counters(progress: dict[str, Any]) -> list[str]:
    return [
        f"'progress' has no {field.name!r} that is a number"
        for field in fields(Progress)
        if type(progress.get(field.name)) not in (int, bool) or progress[field.name] < -1
    ]


def _wrong_lengths(checkpoint: dict[str, Any]) -> list[str]:
    size = checkpoint["world_size"]
    return [
        f"{name!r} has {len(checkpoint[name])} entries for {size} processes"
        for name in PER_PROCESS
        if len(checkpoint[name]) != size
    ]
