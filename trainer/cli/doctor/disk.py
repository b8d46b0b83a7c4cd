"""Check the disk that checkpoints are written to: space, speed, kind of file system, a save and a load."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.cli.doctor.results import CheckResult, check_result, gib
from trainer.errors import CheckpointError

ENOUGH_DISK = 10 * 2**30
SAMPLE = 32 * 2**20
"""Bytes that are written to measure the speed."""
SLOW_SYNC_S = 0.5
SKEW_S = 5.0


@contextmanager
def scratch(root: Path) -> Iterator[Path]:
    """Make a folder below `root`, and remove it at the end together with the parents made for it."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another process has written there
            for made in missing:
                made.rmdir()


def disk(root: Path) -> Iterator[CheckResult]:
    """Check the file system of `default_root_dir` with a checkpoint that is removed again."""
    try:
        with scratch(root) as folder:
            yield _space(root)
            yield from _writing(folder)
            yield _checkpoint(folder)
    except OSError as error:
        fix = "Give another one: --trainer.default_root_dir FOLDER."
        yield CheckResult("FAIL", "disk", f"default_root_dir {root} cannot be written: {error.strerror or error}.", fix)


def _space(root: Path) -> CheckResult:
    usage = shutil.disk_usage(root)
    where = f"{root} ({file_system(root)})"
    few = usage.free < max(ENOUGH_DISK, usage.total / 100)
    fix = "A checkpoint has about three times the weights' bytes with Adam, and two exist while one is replaced."
    return check_result("WARN", few, "disk", f"{where}: {gib(usage.free)} of {gib(usage.total)} are free", fix)


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the kind of file system that holds `path`, such as "ext4" or "nfs4"."""
    points = {"": "unknown file system"}
    with suppress(OSError):
        lines = [line.split()[1:3] for line in mounts.read_text().splitlines()]
        points |= {place.replace("\\040", " "): kind for place, kind in lines}
    return points[max((place for place in points if path.absolute().is_relative_to(place or "/")), key=len)]


def _writing(folder: Path) -> Iterator[CheckResult]:
    """Check the bandwidth of writing, the time of a flush, and the clock of the file server."""
    path = folder / "sample"
    speed = SAMPLE / _seconds_to_append(path, os.urandom(SAMPLE))
    flush = _seconds_to_append(path, b"1")
    text = f"{speed / 1e6:,.0f} MB/s with fsync, {1000 * flush:.1f} ms for a small one"
    fix = "Checkpoints wait for a dozen of these: write them less often, or elsewhere, or with async_save=True."
    yield check_result("WARN", flush > SLOW_SYNC_S, "writing", text, fix)
    skew = path.stat().st_mtime - time.time()
    if abs(skew) > SKEW_S:
        found = f"the files' times differ from this machine's clock by {skew:+.0f} s."
        yield CheckResult("WARN", "clock", found, "Run NTP on both: the newest run is chosen by these times.")


def _seconds_to_append(path: Path, data: bytes) -> float:
    began = time.perf_counter()
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def _checkpoint(folder: Path) -> CheckResult:
    """Save tensors as a run does, load them, and compare every bit."""
    import torch

    from trainer.checkpoint.format import read_checkpoint
    from trainer.checkpoint.manifest import verify_checkpoint
    from trainer.checkpoint.writing import write_checkpoint

    state = {"model": {"weight": torch.randn(1024, 2048), "half": torch.randn(512).bfloat16()}}
    path = folder / "checkpoint"
    try:
        began = time.perf_counter()
        write_checkpoint(path, state)
        saved = time.perf_counter()
        problems = verify_checkpoint(path)
        read = read_checkpoint(path)["model"]
        loaded = time.perf_counter()
    except CheckpointError as error:
        fix = "See the lines above about the disk."
        return CheckResult("FAIL", "checkpoint", f"a save and load failed: {error}", fix)
    if problems or not all(torch.equal(read[name], tensor) for name, tensor in state["model"].items()):
        fix = "The disk or its file system loses data: do not train here."
        return CheckResult("FAIL", "checkpoint", f"what was read is not what was written. {' '.join(problems)}", fix)
    text = f"8 MiB saved in {1000 * (saved - began):.0f} ms, verified and loaded in {1000 * (loaded - saved):.0f} ms"
    return CheckResult("OK", "checkpoint", f"{text}, every bit the same")
