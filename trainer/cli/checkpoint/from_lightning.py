"""`trainer checkpoint import`: write a Lightning checkpoint as one of this package.

The file is a pickle. It is read by torch's restricted unpickler, which makes tensors, plain data, paths and numpy's
numbers and arrays, and calls nothing else, in a separate process: `python -m trainer.cli.checkpoint.from_lightning`. So
are files that `fit(ckpt_path=...)` and `load_from_checkpoint` are given.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint.deserialization import TensorInfo, deserialize
from trainer.checkpoint.hook_checkpoint import ADDED
from trainer.checkpoint.lightning_file import OWN, import_file
from trainer.errors import CheckpointError

_Imported = tuple[dict[str, Any], dict[str, Any], str]

INSTEAD = (
    "Where you trust it, in the environment that wrote it: torch.save({'state_dict': torch.load(path, "
    "weights_only=False)['state_dict']}, 'weights.ckpt'), and give that file."
)
TAKEN = (
    *("state_dict", "hyper_parameters", "hparams", "datamodule_hyper_parameters", "epoch", "global_step", "loops"),
    *("optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision"),
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
    print(import_file(Path(options.path), Path(options.out), options.force), end="")
    return 0


def convert(file: str, out: str, force: bool) -> str:
    """Write the checkpoint `out`, and return what has been taken and what has not.

    Raises:
        CheckpointError: the file is not a checkpoint of Lightning, would run code, or `out` is there.
    """
    from trainer.checkpoint.writing import write_checkpoint

    read, left = _read(file), list[str]()
    _check(read)
    own = read.pop(OWN, None)
    state, info, continues = _of_lightning(read) if own is None else _of_this_package(read, own)
    state["model"] = read["state_dict"]
    state["hyperparameters"] = _hyperparameters(read, state["hyperparameters"], left)
    state[ADDED] = state.get(ADDED, {}) | _added(read, left)
    write_checkpoint(out, state, info=info, overwrite=force)
    of_module, of_data = (len(state["hyperparameters"].get(owner, ())) for owner in ("module", "data"))
    lines = [
        f"{out}: {len(state['model'])} weights and {of_module + of_data} hyperparameters, of epoch "
        f"{info['epoch']}, step {info['step']}",
        f"for Module.load_from_checkpoint({out!r})",
        continues.replace("OUT", repr(out)),
        f"not taken: {', '.join(left) or 'nothing'}",
    ]
    return "\n".join(lines)


def _of_lightning(read: Mapping[str, Any]) -> _Imported:
    """Return the state and info of a checkpoint, but for weights and hyperparameters, and how it continues."""
    from trainer.cli.checkpoint.lightning_training import training_of, weights_alone
    from trainer.loop.progress import Progress

    info: dict[str, Any] = {"epoch": read.get("epoch", 0), "step": read.get("global_step", 0)}
    try:
        state = training_of(read)
    except CheckpointError as error:
        words = f"a training starts again with these weights: {error}"
        return weights_alone(asdict(Progress(**info))), {**info, "weights_only": True}, words
    words = (
        f"or fit(ckpt_path=OUT): with the states of all optimizers ({len(state['optimizers'])}) and schedulers "
        f"({len(state['schedulers'])}); the order of the samples is another"
    )
    return state, info, words


def _of_this_package(read: Mapping[str, Any], own: Mapping[str, Any]) -> _Imported:
    """Return the same of a file that was written here, which has all that a folder has."""
    import torch

    from trainer.checkpoint.schema import require

    require(own, {"info": {str: object}, "entries": {str: {"data": object, "tensors": {str: torch.Tensor}}}}, OWN)
    state = {}
    for key, one in own["entries"].items():
        state[key] = deserialize(one["data"], partial(_tensor_of, one["tensors"]), f"{OWN}, {key!r:.100}")
    return state, {**own["info"], "step": read["global_step"], "epoch": read["epoch"]}, "or fit(ckpt_path=OUT)"


def _tensor_of(tensors: Mapping[str, Any], info: TensorInfo) -> Any:
    if info.name not in tensors:
        raise CheckpointError(f"the tensor {info.name!r:.100} in {OWN!r} is missing.")
    return tensors[info.name]


def _hyperparameters(read: Mapping[str, Any], own: Mapping[str, Any], left: list[str]) -> dict[str, Any]:
    """Return the hyperparameters of module and data module as a checkpoint stores them, with their kinds.

    Args:
        own: what this package has stored in the file.
    """
    from trainer.hyperparameters import encoded_hyperparameters

    given: dict[str, Any] = {
        "module": read.get("hyper_parameters") or read.get("hparams"),
        "data": read.get("datamodule_hyper_parameters"),
    }
    kept = {owner: _storable(values, left) for owner, values in given.items() if values}
    kinds = {**own.get("kinds", {})}
    for owner in kept:
        kinds[owner] = encoded_hyperparameters(given[owner])[1] | kinds.get(owner, {})
    names = {"module": read.get("hparams_name", "kwargs"), "data": read.get("datamodule_hparams_name", "kwargs")}
    in_one = {owner: name for owner, name in names.items() if name != "kwargs" and owner in kept}
    return {**({"arguments": in_one} if in_one else {}), **own, **kept, "kinds": kinds}


def _added(read: Mapping[str, Any], left: list[str]) -> dict[str, Any]:
    """Return the entries that hooks have added, as far as a checkpoint can store them."""
    from trainer.checkpoint.serialization import serialize

    added = {}
    for name, value in read.items():
        if name in TAKEN + OF_THE_FILE:
            continue
        try:
            serialize(value, name)
            added[name] = value
        except CheckpointError:
            left.append(str(name))
    return added


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


def _read(file: str) -> dict[str, Any]:
    """Read a file with torch's restricted unpickler."""
    from pickle import UnpicklingError

    import torch

    try:
        if zipfile.is_zipfile(file) and (damaged := zipfile.ZipFile(file).testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} in it does not match")
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
    """Return the classes besides torch's that may be made from a file: all that a checkpoint here can have.

    They only hold what they are given. A path has the class of the machine that wrote it, which Python 3.13 and earlier
    versions call differently, and becomes one of this machine.
    """
    import pathlib
    from datetime import timedelta

    import numpy as np

    kinds = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    paths = [(pathlib.Path, f"{module}.{kind}") for module in ("pathlib", "pathlib._local") for kind in kinds]
    numbers = [type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")]
    makers = {"scalar": np.float64(0).__reduce__()[0], "_reconstruct": np.zeros(0).__reduce__()[0]}
    names = [(make, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core") for name, make in makers.items()]
    return [*paths, *names, np.dtype, np.ndarray, *numbers, timedelta, range, set, frozenset]


def _cause(message: str) -> str:
    """Return what torch's message says is wrong, without its advice."""
    called = re.search(r"(?:GLOBAL |class |function )(\S*\w)", message)
    return called[1] if called else (message.strip().splitlines() or ["it ends early"])[0].partition(". ")[0]


if __name__ == "__main__":
    try:
        read_from, write_to, forced = sys.argv[1:]
        print(convert(read_from, write_to, forced == "1"))
    except CheckpointError as error:
        sys.exit(" ".join(str(error).split()))
