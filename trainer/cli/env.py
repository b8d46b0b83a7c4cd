"""`trainer env`: print how this process was started, the variables that show it, versions and devices."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import trainer
from trainer.cli.options import CommandParser, reports_errors
from trainer.errors import ConfigError

EXAMPLES = """\
examples:
  trainer env                                  on this machine
  trainer env --json                           for programs, and for reports of errors
  srun -n 2 trainer env                        what a job step would see
  torchrun --nproc-per-node 2 -m trainer env   what torchrun's processes see
"""
PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "deepspeed",
    "torch_xla",
    "ray",
    "tensorboard",
    "torchmetrics",
    "transformers",
)
PREFIXES = (
    "TRAINER_",
    "CUDA_VISIBLE",
    "HIP_VISIBLE",
    "NCCL_",
    "GLOO_",
    "OMP_NUM_THREADS",
    "TORCH_",
    "PYTORCH_",
    "PET_",
)


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the environment. Returns the exit code: 2 if the variables contradict each other."""
    words = "Show how this process was started and why that is known, versions and devices."
    parser = CommandParser(prog="trainer env", description=words, epilog=EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse(arguments)
    found = {"versions": versions(), "machine": machine(), "devices": devices(), **environment()}
    text = json.dumps(found, indent=2) if options.json else "\n".join(_lines(found))
    # One call of print, since several processes may print at once.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 2 if found["problem"] else 0


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that matter, None if not installed, without importing them."""
    found: dict[str, str | None] = {"trainer": trainer.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """Return the name, system, processors and memory of this machine."""
    from trainer.launchers.launcher import usable_cores

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    host, system = socket.gethostname(), platform.platform()
    return {"host": host, "system": system, "cores": usable_cores(), "memory_gib": round(memory, 1)}


def devices() -> dict[str, Any]:
    """Return the accelerators that torch sees, and its backends for collectives."""
    import torch
    import torch.distributed as dist

    gpus = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        gpus.append({"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)})
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return {
        "built_for": (torch.version.cuda and f"CUDA {torch.version.cuda}") or torch.version.hip or "cpu",
        "cuda": gpus,
        "mps": torch.backends.mps.is_available(),
        "backends": [name for name, available in backends.items() if dist.is_available() and available()],
    }


def environment() -> dict[str, Any]:
    """Return the detected environment and, for each launcher, the variables that are set and their meaning."""
    from trainer.distributed.environment import SOURCES, detect_environment

    sources = []
    for source in SOURCES:
        seen = {name: os.environ[name] for name in source.variables if name in os.environ}
        try:
            found = source.read(os.environ)
        except ConfigError as error:
            found = f"contradiction: {error}"
        answer = f"no: {found}" if isinstance(found, str) else "yes"
        sources.append({"name": source.name, "decides_when": source.decides, "seen": seen, "answer": answer})
    process, problem = {}, ""
    try:
        process = vars(detect_environment())
    except ConfigError as error:
        problem = str(error)
    others = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    return {"started_by": process, "problem": problem, "sources": sources, "variables": others}


def _lines(found: dict[str, Any]) -> list[str]:
    process, here, seen = found["started_by"], found["machine"], found["devices"]
    started = f"error: {found['problem']}"
    if process.get("source") == "single process":
        started = "no launcher: a single process (Trainer(devices=...) starts more)"
    elif process:
        started = (
            f"{process['source']}: rank {process['rank']} of {process['world_size']}, on this machine "
            f"{process['local_rank']} of {process['local_world_size']}, machine {process['node_rank']} of "
            f"{process['num_nodes']}, rendezvous at {process['master_addr']}:{process['master_port']}"
        )
    lines = ["started by:", f"  {started}", "why (the first yes decides):"]
    for source in found["sources"]:
        lines.append(f"  {source['name']:<12}{source['answer']}")
        lines += [f"  {'':<12}  {name}={value}" for name, value in source["seen"].items()]
    lines += ["versions:", *(f"  {name} {number or 'is not installed'}" for name, number in found["versions"].items())]
    cores = f"{here['cores']} cores for this process, {here['memory_gib']} GiB of memory"
    lines += ["machine:", f"  {here['host']}: {here['system']}, {cores}"]
    lines += ["devices:", f"  torch is built for {seen['built_for']}; collectives: {', '.join(seen['backends'])}"]
    lines += [f"  cuda:{number} {gpu['name']}, {gpu['memory_gib']} GiB" for number, gpu in enumerate(seen["cuda"])]
    lines += ["  mps"] if seen["mps"] else []
    return [*lines, "other variables:", *(f"  {name}={value}" for name, value in found["variables"].items())]
