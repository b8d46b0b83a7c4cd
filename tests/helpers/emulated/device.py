"""An accelerator emulated in host memory, with streams and a process group, for tests of what no CPU shows.

`install` builds the C++ sources of this folder, once for all processes, and tells torch about the device, which
cannot be undone: tests call it in processes of their own. `counts` says what the host has waited for.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

NAME = "emulated"
FOLDER = Path(__file__).parent
SOURCES = ("device.cpp", "process_group.cpp")
_pickled = 0


def skip_if_missing() -> None:
    """Skip the test, with the reason, where the device cannot be built; else build it."""
    for tool in (os.environ.get("CXX", "c++"), "ninja"):
        if not shutil.which(tool):
            pytest.skip(f"the emulated accelerator is compiled, and there is no {tool}")
    build()


def build() -> Path:
    """Return the compiled extension; the first of all processes that ask compiles it, which takes a minute."""
    parts = [(FOLDER / name).read_bytes() for name in ("device.h", *SOURCES)]
    about = f"{torch.__version__} {platform.python_version()} {torch.__path__[0]}"
    digest = hashlib.sha256(b"\0".join([about.encode(), *parts])).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"emulated-device-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / "emulated_device.so"
    with open(folder / "compiling", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(folder)
            (folder / "work" / library.name).rename(library)
    return library


def _compile(folder: Path) -> None:
    from torch.utils.cpp_extension import _write_ninja_file_and_build_library

    # `load` would also import it, and leaves a lock behind when it is killed.
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    _write_ninja_file_and_build_library(
        name="emulated_device",
        sources=[str(FOLDER / name) for name in SOURCES],
        extra_cflags=["-std=c++20", "-O1", "-Wno-deprecated"],
        extra_cuda_cflags=[],
        extra_sycl_cflags=[],
        extra_ldflags=[],
        extra_include_paths=[str(FOLDER)],
        build_directory=str(work),
        verbose=False,
        with_cuda=False,
        with_sycl=False,
        is_standalone=False,
    )


@cache
def extension() -> Any:
    """Return the compiled module."""
    spec = importlib.util.spec_from_file_location("emulated_device", build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["emulated_device"] = module
    spec.loader.exec_module(module)
    return module


@cache
def install(devices: int = 2) -> None:
    """Register the device "emulated", of which there are `devices`, for this process."""
    import torch.distributed as dist

    from tests.helpers.emulated import torch_module

    os.environ["EMULATED_DEVICES"] = str(devices)
    extension()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, torch_module)
    torch.utils.generate_methods_for_privateuse1_backend()
    # Asked before torch's own: a pickle names the device, on which every reader of it then takes memory.
    torch.serialization.register_package(0, _count_pickled, lambda storage, place: None)

    def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return extension().make_group(gloo, rank, size)

    dist.Backend.register_backend(NAME, make_group, devices=[NAME])


def _count_pickled(storage: Any) -> None:
    global _pickled
    _pickled += storage.device.type == NAME


def counts() -> dict[str, int]:
    """Return what has happened since `install`: for what the host waited, and what went wrong without an error."""
    return {**extension().counts(), "pickled": _pickled}
