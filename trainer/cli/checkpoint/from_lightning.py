"""`trainer checkpoint import`: write a Lightning checkpoint as one of this package.

The file is a pickle. It is read by torch's restricted unpickler, which makes tensors, plain data, paths and numpy's
numbers and calls nothing else, in a separate process: `python -m trainer.cli.checkpoint.from_lightning`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trainer
from trainer.errors import CheckpointError

INSTEAD = (
    "Where you trust it, in the environment that wrote it: torch.save({'state_dict': torch.load(path, "
    "weights_only=False)['state_dict']}, 'weights.ckpt'), and import that file."
)
TAKEN = (
    *("state_dict", "hyper_parameters", "hparams", "datamodule_hyper_parameters", "epoch", "global_step", "loops"),
    *("optimizer_states", "lr_schedulers"),
)
"""Entries that are taken, as far as they have a place here."""
OF_THE_FILE = (
    "pytorch-lightning_version",
    "hparams_name",
    "hparams_type",
    "datamodule_hparams_name",
    "hparams_signature",
)
"""Entries that only describe the file."""


def import_lightning(options: argparse.Namespace) -> int:
    """Import a file in a separate process; return the exit code.

    Raises:
        CheckpointError: there is no such file, it is not a checkpoint of Lightning, or would run code.
    """
    if not Path(options.path).is_file():
        raise CheckpointError(f"{options.path} is not a file: give a .ckpt file that Lightning has written.")
    here = str(Path(trainer.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    words = [options.path, options.out, str(int(options.force)), options.optimizer or ""]
    child = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.cli.checkpoint.from_lightning", *words],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"the process that read it ended with {child.returncode}"]
        raise CheckpointError(f"{options.path} cannot be imported: {lines[-1]}")
    print(child.stdout, end="")
    return 0


def convert(file: str, out: str, force: bool, optimizer: str | None = None) -> str:
    """Write the checkpoint `out`, and return what has been taken and what has not.

    Args:
        optimizer: the name of the optimizer's class; None to find it by its options.

    Raises:
        CheckpointError: the file is not a checkpoint of Lightning, would run code, or `out` is there.
    """
    from trainer.checkpoint.writing import write_checkpoint
    from trainer.cli.checkpoint.lightning_training import training_of
    from trainer.hyperparameters import encoded_hyperparameters

    read = _read(file)
    _check(read)
    weights, no_data = read["state_dict"], list[str]()
    given: dict[str, Any] = {
        "module": read.get("hyper_parameters") or read.get("hparams"),
        "data": read.get("datamodule_hyper_parameters"),
    }
    kept = {owner: _storable(values, no_data) for owner, values in given.items() if values}
    kinds = {owner: encoded_hyperparameters(given[owner])[1] for owner in kept}
    state = {"model": weights, "hyperparameters": {**kept, "kinds": kinds}}
    progress: dict[str, Any] = {"epoch": read.get("epoch", 0), "step": read.get("global_step", 0)}
    try:
        training = training_of(read, optimizer)
        continues = (
            f"or fit(ckpt_path={out!r}): with the state of {training['optimizers'][0]['kind']} and of "
            f"{len(training['schedulers'])} schedulers; the order of the samples is another"
        )
    except CheckpointError as error:
        training, continues = {"progress": progress}, f"a training starts again with these weights: {error}"
    write_checkpoint(out, {**training, **state}, info=progress, overwrite=force)
    no_data += [str(name) for name, value in read.items() if name not in TAKEN + OF_THE_FILE and _is_something(value)]
    lines = [
        f"{out}: {len(weights)} weights and {sum(map(len, kept.values()))} hyperparameters, of epoch "
        f"{progress['epoch']}, step {progress['step']}",
        f"for Module.load_from_checkpoint({out!r})",
        continues,
        f"not taken: {', '.join(no_data) or 'nothing'}",
    ]
    return "\n".join(lines)


def _storable(hyperparameters: Mapping[str, Any], left: list[str]) -> dict[str, Any]:
    """Return the hyperparameters as a checkpoint stores them; add to `left` those that it cannot store."""
    from trainer.checkpoint.serialization import serialize
    from trainer.hyperparameters import as_stored

    stored = {}
    for name, value in hyperparameters.items():
        try:
            serialize(as_stored(value), name)
            stored[name] = as_stored(value)
        except CheckpointError:
            left.append(f"hyperparameter {name} (a {type(value).__name__})")
    return stored


def _is_something(value: Any) -> bool:
    return not isinstance(value, (type(None), dict, list, tuple, str)) or bool(value)


def _check(read: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the entries that are taken are what Lightning writes."""
    import torch

    from trainer.checkpoint.schema import Integer, require

    named = {str: object}
    hyperparameters = dict.fromkeys(("hyper_parameters?", "hparams?", "datamodule_hyper_parameters?"), (named, None))
    counters = dict.fromkeys(("epoch?", "global_step?"), Integer())
    require(read, {"state_dict?": named, **hyperparameters, **counters}, "checkpoint")
    weights = read.get("state_dict")
    if not weights:
        raise CheckpointError("it has no weights under 'state_dict', as files of Lightning have.")
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            raise CheckpointError(f"the weight {name!r} in 'state_dict' is a {type(value).__name__}, not a tensor.")


def _read(file: str) -> Mapping[str, Any]:
    """Read a file with torch's restricted unpickler."""
    from pickle import UnpicklingError

    import torch

    try:
        with torch.serialization.safe_globals(_harmless()):
            read = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise CheckpointError(f"to read it would run code ({_cause(str(error))}). {INSTEAD}") from None
    except Exception as error:  # of any kind, from a file that is not a pickle
        raise CheckpointError(f"it is damaged, or not a file of torch.save ({_cause(str(error))}).") from None
    if not isinstance(read, dict):
        raise CheckpointError(f"it contains a {type(read).__name__}, where files of Lightning have a dict.")
    return read


def _harmless() -> list[Any]:
    """Return the classes besides torch's that may be made from a file: classes of paths, and of numpy's numbers.

    They only hold what they are given. A path has the class of the machine that wrote it, which Python 3.13 and earlier
    versions call differently, and becomes one of this machine.
    """
    import pathlib

    import numpy as np

    kinds = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    paths = [(pathlib.Path, f"{module}.{kind}") for module in ("pathlib", "pathlib._local") for kind in kinds]
    numbers = [type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")]
    scalar = np.float64(0).__reduce__()[0]
    names = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return [*paths, *names, np.dtype, *numbers]


def _cause(message: str) -> str:
    """Return what torch's message says is wrong, without its advice."""
    called = re.search(r"(?:GLOBAL |class |function )(\S*\w)", message)
    return called[1] if called else (message.strip().splitlines() or ["it ends early"])[0].partition(". ")[0]


if __name__ == "__main__":
    try:
        read_from, write_to, forced, named = sys.argv[1:]
        print(convert(read_from, write_to, forced == "1", named or None))
    except CheckpointError as error:
        sys.exit(" ".join(str(error).split()))
