"""Find the package that connects torch to a TPU: TorchTPU (`torch_tpu`), or its predecessor `torch_xla`."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from trainer.errors import ConfigError

ENVIRONMENT = "python3 -m venv .venv-xla && .venv-xla/bin/pip install torch==2.9.0 torch_xla==2.9.0 --editable ."
"""Commands to create an environment for torch_xla, whose last release needs torch 2.9; also in docs/tpu.md."""


def choose_tpu_stack() -> tuple[str | None, str]:
    """Return the device type, and a text with its package and the reason; or None, and why there is none.

    `"tpu"` is TorchTPU's ordinary device, which runs the ordinary strategies. `"xla"` is torch_xla's, which runs only
    the strategies made for it. Neither package is imported.
    """
    has_tpu, problem = torch_tpu_is_ready(), torch_xla_problem()
    if has_tpu:
        other = ", which comes before torch_xla" if problem is None else ""
        return "tpu", f"TorchTPU {_version('torch_tpu')} has registered the device{other}"
    missing = "torch_tpu is installed but sees no TPU" if _installed("torch_tpu") else "torch_tpu is not installed"
    if problem is None:
        return "xla", f"torch_xla {_version('torch_xla')}, because {missing}"
    return None, f"{missing}, and {problem}"


def torch_tpu_is_ready() -> bool:
    """Return True if TorchTPU has registered its device: on a machine with a TPU, when torch is imported."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "tpu"


def torch_xla_problem() -> str | None:
    """Return why torch_xla cannot be used here, with the commands to fix it; None if it can."""
    if not _installed("torch_xla"):
        return f"torch_xla is not installed. It needs a separate environment: {ENVIRONMENT}"
    theirs, ours = _minor(_version("torch_xla")), _minor(str(torch.__version__))
    if theirs != ours:
        return (
            f"torch_xla {_version('torch_xla')} needs torch {theirs}, and this is torch {torch.__version__}. Make an "
            f"environment for it: {ENVIRONMENT}"
        )
    return None


def tpu_is_there() -> bool:
    """Return True if this machine has a TPU that an installed package can use."""
    if torch_tpu_is_ready():
        return True
    # The chips as the TPU driver shows them, on both kinds of virtual machines.
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return bool(chips) and torch_xla_problem() is None


SHARED = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
"""Set by TorchTPU before the processes of a machine are started: without it they cannot share its chips."""


def share_chips(processes: int) -> None:
    """Set the environment so that each process started from now on gets one chip of TorchTPU.

    Raises:
        ConfigError: the chips cannot be shared by this number of processes.
    """
    from torch.tpu import distributed  # type: ignore[import-not-found]

    try:
        distributed.set_tpu_launch_env(nproc_per_node=processes)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"devices={processes}: TorchTPU cannot share the chips so ({error}).") from error


def sharing_problems(device_type: str, processes: int, source: str) -> list[str]:
    """Return why the processes of this machine, started by `source`, would not get a chip each."""
    if device_type != "tpu" or processes == 1 or SHARED in os.environ:
        return []
    return [
        f"{source} started {processes} processes, and TorchTPU has given them no chips ({SHARED} is not set). Before "
        "starting them: eval \"$(python -m torch.tpu.distributed | sed 's/^/export /')\""
    ]


def xla_scalar(value: float) -> torch.Tensor:
    """Return a 0-dim float64 tensor sharded like the result of a step, so that a compiled program accepts either."""
    import torch_xla
    from torch_xla.distributed import spmd

    number = torch.tensor(value, dtype=torch.float64).to(torch_xla.device())
    spmd.mark_sharding(number, spmd.get_1d_mesh("all"), ())
    return number


def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(of unknown version)"


def _minor(text: str) -> str:
    found = re.match(r"\d+\.\d+", text)
    return found[0] if found else text
