"""Choose and lock the run directory, and find checkpoints in run directories."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.arguments import kept_path, local_path
from trainer.checkpoint.deserialization import from_json, to_json
from trainer.checkpoint.directory import CHECKPOINTS, CheckpointDirectory, locate, versions
from trainer.checkpoint.disk import ReadError, make_directory, replace_notes, sync_directory, temporary_path_for
from trainer.checkpoint.manifest import checkpoints_in, is_committed, read_manifest, read_metadata
from trainer.checkpoint.schema import Integer, wrong
from trainer.checkpoint.storage import StoragePath, as_storage_path, read_small_file, real_path
from trainer.distributed.process_group import SingleProcess
from trainer.errors import CheckpointError, ConfigError, first_of, printable
from trainer.fault_tolerance.file_lock import NAME, FolderLock
from trainer.metrics.logger_folder import LoggerFolder
from trainer.runs.compare_ranks import compare
from trainer.settings import Settings

if TYPE_CHECKING:
    from trainer.loop.run import Run

_YOUNG_S = 60.0
_ENDED = ".ended"
_SEEN_S = 5.0
"""For a network file system to show on one machine what another has written."""
log = logging.getLogger("trainer")


def find_checkpoint(run: Run, ckpt_path: str | Path | None) -> StoragePath | None:
    """Return the checkpoint for `ckpt_path`; None for None, and for "last" in `fit` if there is no checkpoint yet.

    "last" and "best" are searched in this trainer's run directory or its ModelCheckpoint's `dirpath`; in a new process,
    in the newest run directory below `default_root_dir` that has one. A run directory stands for its last checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if ckpt_path is None:
        return None
    if ckpt_path not in ("last", "best"):
        given = as_storage_path(ckpt_path)
        found = locate(given)
        if found.parent == given / CHECKPOINTS:
            log.info("%s is a run directory: its last checkpoint is %s", printable(str(given)), printable(found.name))
        return found
    folders = checkpoint_dirs(run, best=ckpt_path == "best")
    for folder in folders:
        try:
            found = CheckpointDirectory(folder).resolve(ckpt_path)
            return _newest_of_run(run, _of_latest_run(run, found)) if ckpt_path == "last" else _said(run, found)
        except ReadError:
            raise
        except CheckpointError as error:
            if ckpt_path == "last" and (corruption_report := CheckpointDirectory(folder).corruption_report()):
                # Do not fall back to an older run or a new training.
                last = run.session.argument("ckpt_path", "last")
                raise CheckpointError(
                    f"{last}: {error}, but there was one: {'; '.join(corruption_report)}. "
                    f"To start anew, leave out {last} or remove that folder."
                ) from None
    if ckpt_path == "last" and run.stage == "fit":
        where = printable(str(run.session.named_run or run.settings.root))
        last = run.session.argument("ckpt_path", "last")
        log.info("%s: there is no checkpoint in %s yet, and the training begins anew", last, where)
        return None
    for callback in run.checkpoint_callbacks if run.session.has_fit else ():
        if path := callback.best_model_path if ckpt_path == "best" else callback.last_model_path:
            return locate(as_storage_path(path))
    named = run.session.argument("ckpt_path", str(ckpt_path))
    for folder in folders if ckpt_path == "best" else ():
        with suppress(CheckpointError):
            found = CheckpointDirectory(folder).resolve("last")
            log.info("%s: no ModelCheckpoint(monitor=...) has chosen one, so the last is taken", named)
            return found
    looked = [str(folder) for folder in folders] or [str(run.settings.root)]
    raise CheckpointError(
        f"{named}: no such checkpoint. Looked in: {first_of(looked)}. "
        "Give the path of a checkpoint folder, or the default_root_dir of the run that wrote it."
    )


def refuse_weights_alone(run: Run, ckpt_path: str | Path | None, path: StoragePath) -> StoragePath | None:
    """Refuse a checkpoint from which no training can go on; None: the run was killed before it had another.

    Raises:
        CheckpointError: the message names the nearest from which one can.
    """
    info = read_manifest(path).info
    if not info.get("weights_only"):
        return path
    infos = {str(one): read_manifest(one).info for one in checkpoints_in(path.parent)}
    full = [one for one, about in infos.items() if not about.get("weights_only")]
    saves_all = not all(one.save_weights_only for one in run.checkpoint_callbacks)
    if ckpt_path == "last" and not full and saves_all and "left_out" not in info:
        log.info("%s has weights only, and there is no other yet: the training begins anew", printable(str(path)))
        return None
    nearest = min(full, key=lambda one: abs(_number(infos[one].get("step")) - _number(info.get("step"))), default=None)
    fix = "there is no other beside it" if nearest is None else f"the nearest from which it can is {printable(nearest)}"
    raise CheckpointError(
        f"{printable(str(path))} has weights only (save_weights_only=True, or the rest could not be stored), from "
        f"which no training can go on: {fix}. "
        "To begin another training with these weights: load_from_checkpoint, and fit without ckpt_path."
    )


def _said(run: Run, best: StoragePath) -> StoragePath:
    """Return the best checkpoint; where several ModelCheckpoints choose one, log which was taken."""
    monitors = [one.monitor for one in run.checkpoint_callbacks if one.monitor is not None]
    if len(monitors) > 1:
        log.info("best: %s, of %s, the first of %s", printable(str(best)), monitors[0], ", ".join(monitors))
    return best


def find_after_restart(run: Run, former: str) -> StoragePath | None:
    """Return the newest checkpoint of an earlier attempt at this run, whose run directory is `former`; or None."""
    folders = [as_storage_path(c.dirpath) for c in run.checkpoint_callbacks if c.dirpath is not None]
    for folder in [*folders, Path(former) / CHECKPOINTS]:
        try:
            found = CheckpointDirectory(folder).resolve("last")
        except ReadError:
            raise
        except CheckpointError:
            continue
        # A dirpath may contain checkpoints of older runs.
        if _absolute(saved_run_dir(found) or "", run.settings) == Path(former):
            return _newest_of_run(run, found)
    return None


def find_again(run: Run, ckpt_path: str | Path | None, found: StoragePath | None) -> StoragePath | None:
    """Return the checkpoint to start from, now that its folder is locked. Collective; rank 0 searches.

    Another run may have gone on in the folder until then, and have deleted the checkpoint that was found.
    """
    wanted: Any = ckpt_path or "last"
    if found is None or run.stage != "fit" or wanted not in ("last", "best"):
        return found
    path = found
    if run.strategy.processes.is_global_zero:
        folder = CheckpointDirectory(found.parent)
        same = folder.pointer(wanted) in (found, None) and is_committed(found)
        path = found if same else folder.resolve(wanted)
    return as_seen_here(run, path)


def as_seen_here(run: Run, path: StoragePath | None) -> StoragePath | None:
    """Return rank 0's path; elsewhere as this process finds it, whose machine may have mounted a disk elsewhere.

    That is tried for what is below `default_root_dir` or a `dirpath`. Collective.
    """
    own = [str(kept_path(run.settings.root)), *(str(one.dirpath) for one in run.checkpoint_callbacks if one.dirpath)]
    named, roots = run.strategy.processes.broadcast_object((None if path is None else str(path), own))
    if named is None:
        return None
    found = as_storage_path(named)
    if isinstance(found, Path) and not os.path.exists(found):  # without an error of a server
        inside = [
            Path(mine, found.relative_to(one))
            for one, mine in zip(roots, own, strict=False)
            if found.is_relative_to(one)
        ]
        return next((one for one in inside if os.path.exists(one)), found)
    return found


def check_folders_of_shards(run: Run) -> None:
    """Check that the `dirpath` of each ModelCheckpoint that writes shards is one folder; see `check_one_folder`."""
    for callback in run.checkpoint_callbacks if run.strategy.shards_state else ():
        folder = None if callback.dirpath is None else as_storage_path(callback.dirpath)
        check_one_folder(run.strategy.processes, f"{type(callback).__name__}.dirpath", folder)


def check_one_folder(processes: SingleProcess, what: str, folder: StoragePath | None) -> None:
    """Check that all processes see one folder under their paths of it. Collective.

    Equal paths are believed. Of others, as of a disk that machines have mounted in different places, rank 0 makes a
    file in its folder, which all have to see.

    Raises:
        ConfigError: as `compare`.
    """
    named = None if folder is None else f"folder {folder}"
    if len(set(processes.all_gather_object(named))) == 1:
        return
    name = None
    if processes.is_global_zero and isinstance(folder, Path):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            probe = temporary_path_for(folder / "one-folder")
            probe.touch()
            name = probe.name
    name = processes.broadcast_object(name)
    ends = time.monotonic() + _SEEN_S
    while not (seen := isinstance(folder, Path) and name is not None and (folder / name).exists()):
        if name is None or time.monotonic() > ends:
            break
        time.sleep(0.1)
    one = all(processes.all_gather_object(seen))
    if processes.is_global_zero and name is not None and isinstance(folder, Path):
        (folder / name).unlink(missing_ok=True)
    if not one:
        fix = "All processes write their shards into it, so it has to be one folder, on a disk that they share."
        compare(processes, iter([(what, named)]), fix)


def _of_latest_run(run: Run, found: StoragePath) -> StoragePath:
    """Return the last checkpoint, captured latest, of the folders that the ModelCheckpoints write in; or `found`.

    A run that began from the path of a checkpoint may have ended when only one of them had written.
    """
    if len(run.checkpoint_callbacks) < 2:
        return found
    folders = [as_storage_path(c.dirpath) for c in run.checkpoint_callbacks if c.dirpath is not None]
    lasts = [CheckpointDirectory(folder).pointer("last") for folder in dict.fromkeys(folders)]
    if len(folders) < len(run.checkpoint_callbacks):
        elsewhere = (CheckpointDirectory(folder).pointer("last") for folder in checkpoint_dirs(run)[len(folders) :])
        lasts.append(next((one for one in elsewhere if one is not None), None))
    latest = max((found, *(one for one in lasts if one is not None)), key=lambda one: (_when(one)[0], _when(one)[2]))
    return found if latest == found else CheckpointDirectory(latest.parent).resolve("last")


def _newest_of_run(run: Run, found: StoragePath) -> StoragePath:
    """Return the newest checkpoint of the run that wrote `found`, in which several ModelCheckpoints may have written.

    Of several checkpoints of one step it is the one captured last, because only its state lists the others.
    """
    if len(run.checkpoint_callbacks) < 2:
        return found
    run_dir = saved_run_dir(found)
    folders = [as_storage_path(c.dirpath) for c in run.checkpoint_callbacks if c.dirpath is not None]
    candidates = [found]
    for folder in dict.fromkeys([*folders, _absolute(str(run_dir), run.settings) / CHECKPOINTS]):
        other = CheckpointDirectory(folder).pointer("last") if folder != found.parent else None
        if other is not None and saved_run_dir(other) == run_dir:
            candidates.append(other)
    newest = max(candidates, key=_when)
    return found if newest is found else CheckpointDirectory(newest.parent).resolve("last")


def _when(checkpoint: StoragePath) -> tuple[bool, float, float]:
    """Return whether a training can go on from a checkpoint, its step, and the time at which its state was captured."""
    info = read_manifest(checkpoint).info
    return not info.get("weights_only"), _number(info.get("step")), _number(info.get("captured"))


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) and value == value else -1


def checkpoint_dirs(run: Run, best: bool = False) -> list[StoragePath]:
    """Return the folders that may contain checkpoints of this run, the likeliest first.

    For the `best` one first those of the callbacks with a monitor, in their order.
    """
    if run.session.has_fit:
        of_run: list[StoragePath] = [run.session.run_dir / CHECKPOINTS]
    elif run.session.named_run is not None:
        of_run = [run.session.named_run / CHECKPOINTS]
    else:
        of_run = [run / CHECKPOINTS for run in reversed(versions(run.settings.root))]
    own = [[] if c.dirpath is None else [as_storage_path(c.dirpath)] for c in run.checkpoint_callbacks]
    if best:
        choosing = [c.monitor is not None for c in run.checkpoint_callbacks]
        first = [folder or of_run for folder, chooses in zip(own, choosing, strict=True) if chooses]
        return [*dict.fromkeys(chain(*first, *own, of_run))]
    return [*chain(*own, of_run)]


def choose_run_dir(run: Run, ckpt_path: str | Path | None, checkpoint: StoragePath | None) -> Path:
    """Return the run directory of this run; a new one is created by `fit` on rank 0, except in a fast_dev_run.

    A `fit` resumed from "last" keeps the checkpoint's run directory; any other `fit` gets a new one. Validate, test and
    predict use the run directory of their checkpoint, unless another `default_root_dir` than that of the checkpoint's
    run was given; or else that of this trainer's `fit`.

    Raises:
        ConfigError: no directory can be made below `default_root_dir`.
    """
    root, given = run.settings.root, run.settings.default_root_dir
    goes_on = checkpoint is not None and (ckpt_path == "last" or run.stage != "fit")
    if goes_on and checkpoint is not None and (known := _run_dir_of(checkpoint, run.settings)) is not None:
        elsewhere = str(given) != Settings.default_root_dir and root.resolve() != known.parent.resolve()
        if run.stage == "fit" or not elsewhere:
            return known
    if run.session.has_fit and run.stage != "fit":
        return run.session.run_dir
    taken = versions(root)
    if taken and _is_left_empty(taken[-1]) and run.stage == "fit" and not run.settings.fast_dev_run:
        return taken[-1]
    number = int(taken[-1].name.removeprefix("version_")) + 1 if taken else 0
    if run.settings.fast_dev_run or not run.strategy.processes.is_global_zero or run.stage != "fit":
        return root / f"version_{number}"
    if taken:
        _delete_leftovers(taken[-1])
    try:
        make_directory(root)
        return _make_version(root, number)
    except OSError as error:
        raise ConfigError(
            f"default_root_dir={str(given)!r}: no run directory can be made there ({error.strerror}). "
            "Give a folder that can be written."
        ) from None


def beginning_of(run: Run, checkpoint: StoragePath | None) -> int:
    """Return when the first `fit` began in the run directory, in nanoseconds since 1970, as the checkpoint has it."""
    if checkpoint is not None and run.strategy.processes.is_global_zero:
        directory = _run_dir_of(checkpoint, run.settings)
        if directory is not None and directory.absolute() == run.session.run_dir.absolute():
            info = read_manifest(checkpoint).info
            known = [info[name] for name in ("began", "captured") if type(info.get(name)) is int and info[name] >= 0]
            return min(known, default=time.time_ns())
    return time.time_ns()


def choose_logger_folders(run: Run, ckpt_path: str | Path | None) -> None:
    """Give the loggers of a run that continues no other a folder in which no run has left files. Collective.

    As in `choose_run_dir`, a `fit` from the path of a checkpoint is a new run. Rank 0 chooses for all. A logger may be
    on some ranks only: the same one elsewhere has the same place among those of its class.

    Raises:
        ConfigError: two would write the same files.
    """
    goes_on = run.resumed_from is not None and (ckpt_path == "last" or run.stage != "fit")
    folders: dict[str, LoggerFolder] = {}
    of_class: Counter[str] = Counter()
    for logger in run.loggers:
        name = type(logger).__qualname__
        of_class[name] += 1
        if logger.place is not None:
            folders[f"{name} {of_class[name]}"] = logger.place
            logger.place.goes_on = goes_on
    numbers: dict[str, int | None] = {}
    places: dict[Any, list[str]] = {}
    if run.strategy.processes.is_global_zero:
        for name, folder in folders.items():
            if not goes_on and folder.depends_on_files and (run.stage == "fit" or not folder.chosen):
                folder.begin(run.session.run_dir)
            numbers[name] = folder.number
            place = os.path.realpath(folder.log_dir(run.session.run_dir) or "")
            places.setdefault((folder.files, place), []).append(name)
    numbers, places = run.strategy.processes.broadcast_object((numbers, places))
    for twins in places.values():
        if len(twins) > 1:
            kind = twins[0].split()[0]
            fix = f"give each a folder of its own, {kind}(save_dir=...)."
            raise ConfigError(f"{len(twins)} {kind}s would write the same files: {fix}")
    for name, folder in () if goes_on else folders.items():
        folder.number, folder.chosen = numbers.get(name), True


def note_end(run: Run) -> None:
    """Write down that the run has ended as a whole, with its last hooks and the files of its loggers."""
    end = {"step": run.progress.step, "epochs": run.progress.epoch}
    replace_notes(run.session.run_dir / _ENDED, to_json(end) + b"\n")


def noted_end(run_dir: Path) -> dict[str, int] | None:
    """Return the steps and epochs of `note_end`; None: the run has not ended, or died before it had written all."""
    file = run_dir / _ENDED
    with suppress(OSError, CheckpointError):
        end = from_json(read_small_file(file, 1000), str(file))
        return None if wrong(end, {"step": Integer(), "epochs": Integer()}, _ENDED) else end
    return None


def _make_version(root: Path, number: int) -> Path:
    """Make `root`/version_N with the first free N from `number` on, although other runs may do so at the same time."""
    while True:
        path = root / f"version_{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            sync_directory(root)
            atexit.register(_remove_if_empty, path.absolute(), os.getpid())
            return path


def _remove_if_empty(run_dir: Path, process: int) -> None:
    """Remove, when the process that made it ends, a run directory into which neither trainer nor user has written."""
    if os.getpid() == process:  # not in a fork of it
        with suppress(OSError):
            run_dir.rmdir()


def _delete_leftovers(run_dir: Path) -> None:
    """Delete what a killed run left of its first checkpoint: no run goes on there, so no other would delete it."""
    folder = run_dir / CHECKPOINTS
    with suppress(CheckpointError, OSError):
        if not folder.is_symlink():
            CheckpointDirectory(folder).clean()


def _is_left_empty(folder: Path) -> bool:
    """Whether a directory is that of a run killed before it wrote anything; a directory just made may be in use."""
    try:
        if time.time() - folder.stat().st_mtime < _YOUNG_S or {path.name for path in folder.iterdir()} - {NAME}:
            return False
        lock = FolderLock(folder)
        if lock.acquire(timeout=0) is not None:
            return False
        lock.release()
        return True
    except OSError:
        return False


def _run_dir_of(checkpoint: StoragePath, settings: Settings) -> Path | None:
    """Return the run directory of the run that wrote `checkpoint`; None if it is not below `default_root_dir`.

    A checkpoint may come from a stranger, so its content must not decide where files are written.
    """
    if isinstance(checkpoint, Path) and checkpoint.parent.name == CHECKPOINTS:
        return checkpoint.parent.parent
    named = saved_run_dir(checkpoint) or ""
    try:
        path = _absolute(named, settings)
        inside = path.parent.resolve() == settings.root.resolve()
        return path if inside and path in versions(path.parent) and path.is_dir() else None
    except (OSError, ValueError):  # no path of this machine
        return None


def _absolute(named: str, settings: Settings) -> Path:
    """Return the path of a run directory that a checkpoint names, see `name_of_run_dir`."""
    path = Path(named)
    return settings.root / path.name if path.parent == local_path(settings.default_root_dir) else path.absolute()


@contextmanager
def locked_folders(run: Run) -> Iterator[None]:
    """Lock the run directory, and folders of checkpoints outside of it, while training. Collective; rank 0 locks.

    Raises:
        ConfigError: another run has locked one of them; the message says which process, where, since when.
    """
    trains = run.strategy.processes.is_global_zero and run.stage == "fit"
    try:
        with ExitStack() as locks:
            problem = None
            if trains and not run.settings.fast_dev_run:
                own = [as_storage_path(c.dirpath) for c in run.checkpoint_callbacks if c.dirpath is not None]
                folders = [run.session.run_dir, *(folder for folder in own if isinstance(folder, Path))]
                for folder in {real_path(folder): folder for folder in folders}.values():
                    problem = problem or _lock(folder, locks, run.session.argument("ckpt_path", "last"))
            problem = run.strategy.processes.broadcast_object(problem)
            if problem is not None:
                raise ConfigError(problem)
            yield
    except BaseException:
        if trains and run.progress.step == 0:
            # A run that failed before its first step leaves no empty directory, which would be the newest one.
            with suppress(OSError):
                run.session.run_dir.rmdir()
        raise


def _lock(folder: Path, locks: ExitStack, last: str) -> str | None:
    """Lock a folder until `locks` are closed; return the problem, or None. `last`: the argument that resumes."""
    lock = FolderLock(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holder = lock.acquire()
    except FileExistsError:
        return None  # a file; ModelCheckpoint says so
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror}). Give another folder: default_root_dir=, or dirpath=."
    if holder is None:
        locks.callback(lock.release)
        return None
    return (
        f"{folder} is in use: {holder} is training there, and two runs in one folder would delete each other's "
        "checkpoints. Wait for it, or end it (kill PID, on that host); or let this run write elsewhere: leave "
        f"{last} out, or give another default_root_dir (dirpath, if ModelCheckpoint has one)."
    )


def saved_run_dir(checkpoint: StoragePath) -> str | None:
    """Return the run directory of the run that wrote a checkpoint; None if the checkpoint does not say it."""
    named = read_metadata(checkpoint).get("run_dir")
    return named if isinstance(named, str) else None
