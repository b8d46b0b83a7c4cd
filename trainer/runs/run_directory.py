"""Choose and lock the run directory, and find checkpoints in run directories."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.arguments import local_path
from trainer.callback import Checkpoint
from trainer.checkpoint.deserialization import from_json, to_json
from trainer.checkpoint.directory import CHECKPOINTS, CheckpointDirectory, locate, versions
from trainer.checkpoint.disk import ReadError, make_directory, replace_notes, sync_directory
from trainer.checkpoint.lightning_file import folder_beside
from trainer.checkpoint.manifest import checkpoints_in, is_committed, read_manifest, read_metadata
from trainer.checkpoint.schema import Integer, wrong
from trainer.checkpoint.storage import StoragePath, as_storage_path, read_small_file, real_path
from trainer.distributed.process_group import SingleProcess
from trainer.errors import CheckpointError, ConfigError, first_of, printable
from trainer.fault_tolerance.file_lock import FolderLock
from trainer.metrics.logger_folder import LoggerFolder
from trainer.runs.facts import named
from trainer.settings import Settings

if TYPE_CHECKING:
    from trainer.loop.run import Run

_ENDED = ".ended"
log = logging.getLogger("trainer")


def find_checkpoint(run: Run, ckpt_path: str | Path | None) -> StoragePath | None:
    """Return the checkpoint for `ckpt_path`; None for None, and for "last" in a `fit` before the first checkpoint.

    "last" and "best" are searched in this trainer's run directory or its ModelCheckpoint's `dirpath`; in a new process,
    in the newest run directory below `default_root_dir` that has one. A run directory stands for its last checkpoint.

    Raises:
        CheckpointError: the checkpoint does not exist.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        return _find_last(run)
    if ckpt_path == "best":
        return _find_best(run)
    return locate(as_storage_path(ckpt_path))


def _find_last(run: Run) -> StoragePath | None:
    """Return the newest checkpoint of the latest run; None if `fit` finds none.

    Where checkpoints are damaged, neither an older run nor a new training takes their place.
    """
    last, folders = run.session.argument("ckpt_path", "last"), checkpoint_dirs(run)
    for folder in folders:
        if (found := _resolve(folder, "last")) is not None:
            return _newest_of_latest_run(run, found)
        if damage := CheckpointDirectory(folder).corruption_report():
            raise CheckpointError(
                f"{last}: there is no intact checkpoint in {folder}, but there was one: {'; '.join(damage)}. "
                f"To start again, leave {last} out, or remove that folder."
            )
    if run.stage != "fit":
        known = _known_to(run, [one.last_model_path for one in run.checkpoint_callbacks])
        if known is None:
            raise _not_found(run, last, folders)
        return known
    where = printable(str(run.session.named_run or run.settings.root))
    log.info("%s: there is no checkpoint in %s yet, so the training starts from the beginning", last, where)
    return None


def _find_best(run: Run) -> StoragePath:
    """Return the checkpoint that a ModelCheckpoint has chosen, of several callbacks the first; else the last one."""
    best, folders = run.session.argument("ckpt_path", "best"), checkpoint_dirs(run, best=True)
    chosen = _first(folders, "best") or _known_to(run, [one.best_model_path for one in run.checkpoint_callbacks])
    if chosen is not None:
        return chosen
    last = _first(folders, "last")
    if last is None:
        raise _not_found(run, best, folders)
    log.info("%s: no ModelCheckpoint(monitor=...) has chosen one, so the last is taken", best)
    return last


def _first(folders: list[StoragePath], wanted: str) -> StoragePath | None:
    """Return "last" or "best" of the first folder that has it."""
    for folder in folders:
        found = _resolve(folder, wanted)
        if found is not None:
            return found
    return None


def _resolve(folder: StoragePath, wanted: str) -> StoragePath | None:
    """Return "last" or "best" of a folder; None if it has none. Raises ReadError if the storage does not answer."""
    try:
        return CheckpointDirectory(folder).resolve(wanted)
    except ReadError:
        raise
    except CheckpointError:
        return None


def _known_to(run: Run, paths: list[str]) -> StoragePath | None:
    """Return the first checkpoint that the callbacks of this trainer's `fit` name."""
    for path in paths:
        if path and run.session.has_fit:
            return locate(folder_beside(as_storage_path(path)))
    return None


def _not_found(run: Run, named: str, folders: list[StoragePath]) -> CheckpointError:
    looked = [str(folder) for folder in folders] or [str(run.settings.root)]
    return CheckpointError(
        f"{named}: no such checkpoint. Looked in: {first_of(looked)}. "
        "Give the path of a checkpoint folder, or the default_root_dir of the run that wrote it."
    )


def refuse_weights_alone(run: Run, ckpt_path: str | Path | None, path: StoragePath) -> StoragePath | None:
    """Refuse a checkpoint that has only weights; None: the run was killed before it had another.

    Raises:
        CheckpointError: the message names the full checkpoints beside it.
    """
    info = read_manifest(path).info
    if not info.get("weights_only"):
        return path
    full = [one for one in checkpoints_in(path.parent) if not read_manifest(one).info.get("weights_only")]
    saves_all = not all(one.save_weights_only for one in run.checkpoint_callbacks)
    if ckpt_path == "last" and not full and saves_all and "left_out" not in info:
        log.info("%s has weights only: the training starts from the beginning", printable(str(path)))
        return None
    raise CheckpointError(
        f"{printable(str(path))} has weights only, so a training cannot continue from it. Resume from another "
        f"checkpoint beside it ({printable(first_of(one.name for one in full)) or 'there is none'}), or start a new "
        "training with these weights: load_from_checkpoint, and fit without ckpt_path."
    )


def find_after_restart(run: Run, former: str) -> StoragePath | None:
    """Return the newest checkpoint of an earlier attempt at this run, whose run directory is `former`; or None."""
    earlier = chain.from_iterable(one.values() for one in _earlier_dirpaths(run))
    for folder in [*_dirpaths(run), *earlier, Path(former) / CHECKPOINTS]:
        found = _resolve(folder, "last")
        # A dirpath may contain checkpoints of older runs.
        if found is not None and _absolute(saved_run_dir(found), run.settings) == Path(former):
            return _newest_of_latest_run(run, found, of_this_run=True)
    return None


def find_again(run: Run, ckpt_path: str | Path | None, found: StoragePath | None) -> StoragePath | None:
    """Return the checkpoint to start from, now that its folder is locked. Collective; rank 0 searches.

    Another run may have trained in the folder until then, and deleted the checkpoint that was found.
    """
    wanted: Any = ckpt_path or "last"
    if found is None or run.stage != "fit" or wanted not in ("last", "best"):
        return found
    if run.strategy.processes.is_global_zero:
        folder = CheckpointDirectory(found.parent)
        if folder.pointer(wanted) not in (found, None) or not is_committed(found):
            found = folder.resolve(wanted)
    return of_rank_zero(run.strategy.processes, found)


def of_rank_zero(processes: SingleProcess, path: StoragePath | None) -> StoragePath | None:
    """Return rank 0's path on all processes. Collective."""
    named = processes.broadcast_object(None if path is None else str(path))
    return None if named is None else as_storage_path(named)


def _newest_of_latest_run(run: Run, found: StoragePath, of_this_run: bool = False) -> StoragePath:
    """Return the newest checkpoint of the latest run, in which several ModelCheckpoints may write.

    A run that began from the path of a checkpoint may have ended when only one of them had written. If several
    checkpoints have the same step, take the one captured last, because only its state lists the others.

    Args:
        of_this_run: the wanted run has written `found`.
    """
    if run.stage == "fit":
        _write_beside(run, found)
    if len(run.checkpoint_callbacks) < 2:
        return found
    latest, dirpaths = found, _dirpaths(run)
    if not of_this_run:
        others = checkpoint_dirs(run)[len(dirpaths) :] if len(dirpaths) < len(run.checkpoint_callbacks) else []
        candidates = [found, *_lasts(dirpaths), *islice(_lasts(others), 1)]
        latest = max(candidates, key=lambda one: (_when(one)[0], _when(one)[2]))
    run_dir = saved_run_dir(latest)
    folders = [*dirpaths, _absolute(run_dir, run.settings) / CHECKPOINTS]
    newest = max([latest, *(one for one in _lasts(folders) if saved_run_dir(one) == run_dir)], key=_when)
    return found if newest == found else CheckpointDirectory(newest.parent).resolve("last")


def _lasts(folders: Iterable[StoragePath]) -> Iterator[StoragePath]:
    """Return the last checkpoint of each folder that has one."""
    return filter(None, (CheckpointDirectory(folder).pointer("last") for folder in folders))


def _when(checkpoint: StoragePath) -> tuple[bool, int, int]:
    """Return whether a training can continue from a checkpoint, its step, and the time when its state was captured."""
    info = read_manifest(checkpoint).info
    numbers = {name: value for name, value in info.items() if isinstance(value, int)}
    return not info.get("weights_only"), numbers.get("step", -1), numbers.get("captured", -1)


def _dirpaths(run: Run) -> list[StoragePath]:
    """Return the folders that the ModelCheckpoints were given."""
    return [as_storage_path(one.dirpath) for one in run.checkpoint_callbacks if one.dirpath is not None]


def _earlier_dirpaths(run: Run) -> Iterator[dict[Checkpoint, Path]]:
    """Yield the folders of the ModelCheckpoints in earlier runs, where they are in the folder of a logger's version.

    In `dirpath=f"{logger.log_dir}/checkpoints"` each start of the program has the number of the next version.
    """
    dirpaths = {one: one.dirpath for one in run.checkpoint_callbacks if one.dirpath is not None}
    for logger in run.loggers:
        yield from logger.folder_of_files.earlier(dirpaths)


def _write_beside(run: Run, found: StoragePath) -> None:
    """Have ModelCheckpoints whose folders are in a logger's next version continue in the version of a checkpoint."""
    for folders in _earlier_dirpaths(run):
        for callback, folder in folders.items() if found.parent in folders.values() else ():
            callback.dirpath = str(folder)


def share_dirpaths(run: Run) -> None:
    """Give the ModelCheckpoints of all processes rank 0's folders: a logger's next version depends on when it is read.

    Collective.
    """
    dirpaths = [None if one.dirpath is None else str(one.dirpath) for one in run.checkpoint_callbacks]
    shared = run.strategy.processes.broadcast_object(dirpaths)
    for callback, own, dirpath in zip(run.checkpoint_callbacks, dirpaths, shared, strict=False):
        if own != dirpath:
            callback.dirpath = dirpath


def checkpoint_dirs(run: Run, best: bool = False) -> list[StoragePath]:
    """Return the folders that may contain checkpoints of this run, the likeliest first.

    For the `best` checkpoint the folders of callbacks with a monitor come first, in their order.
    """
    if run.session.has_fit:
        of_run: list[StoragePath] = [run.session.run_dir / CHECKPOINTS]
    elif run.session.named_run is not None:
        of_run = [run.session.named_run / CHECKPOINTS]
    else:
        of_run = [run / CHECKPOINTS for run in reversed(versions(run.settings.root))]
    of_run = [*chain.from_iterable(one.values() for one in _earlier_dirpaths(run)), *of_run]
    if not best:
        return [*_dirpaths(run), *of_run]
    choosing = [one.dirpath for one in run.checkpoint_callbacks if one.monitor is not None]
    first = [of_run if dirpath is None else [as_storage_path(dirpath)] for dirpath in choosing]
    return [*dict.fromkeys(chain(*first, _dirpaths(run), of_run))]


def choose_run_dir(run: Run, ckpt_path: str | Path | None, checkpoint: StoragePath | None) -> Path:
    """Return the run directory of this run; a new one is created by `fit` on rank 0, except in a fast_dev_run.

    A `fit` resumed from "last" keeps the checkpoint's run directory; any other `fit` gets a new one. Validate, test and
    predict use their checkpoint's run directory, unless it is not in the `default_root_dir` that was given; or else the
    run directory of this trainer's `fit`.

    Raises:
        ConfigError: no directory can be made below `default_root_dir`.
    """
    root, given = run.settings.root, run.settings.default_root_dir
    trains = run.stage == "fit"
    if checkpoint is not None and (ckpt_path == "last" or not trains):
        known = _run_dir_of(checkpoint, run.settings)
        any_root = trains or str(given) == Settings.default_root_dir
        if known is not None and (any_root or root.resolve() == known.parent.resolve()):
            return known
    if run.session.has_fit and not trains:
        return run.session.run_dir
    taken = versions(root)
    number = int(taken[-1].name.removeprefix("version_")) + 1 if taken else 0
    if run.settings.fast_dev_run or not trains:
        return root / f"version_{number}"
    if taken:
        _delete_leftovers(taken[-1])
    try:
        make_directory(root)
        return _make_version(root, number)
    except OSError as error:
        problem = f"no run directory can be made there ({error.strerror}). Give another folder."
        raise ConfigError(f"default_root_dir={str(given)!r}: {problem}") from None


def beginning_of(run: Run, checkpoint: StoragePath | None) -> int:
    """Return when the first `fit` began in the run directory, in nanoseconds since 1970, as the checkpoint has it."""
    now = time.time_ns()
    if checkpoint is None or not run.strategy.processes.is_global_zero:
        return now
    directory = _run_dir_of(checkpoint, run.settings)
    if directory is None or directory.absolute() != run.session.run_dir.absolute():
        return now
    began = read_manifest(checkpoint).info.get("began")
    return began if type(began) is int and 0 <= began < now else now


def choose_logger_folders(run: Run, ckpt_path: str | Path | None) -> None:
    """Give the loggers of a new run folders in which no run has left files. Collective.

    As in `choose_run_dir`, a `fit` from the path of a checkpoint is a new run. Rank 0 chooses for all. A logger may be
    on some ranks only: the same one elsewhere has the same place among the loggers of its class.

    Raises:
        ConfigError: two would write the same files.
    """
    folders = {name: logger.place for name, logger in named(run.loggers) if logger.place is not None}
    twice = _begin_folders(run, folders) if run.strategy.processes.is_global_zero else None
    numbers = {name: folder.number for name, folder in folders.items()}
    goes_on = run.resumed_from is not None and (ckpt_path == "last" or run.stage != "fit" or _is_former_run(run))
    numbers, twice, goes_on = run.strategy.processes.broadcast_object((numbers, twice, goes_on))
    if twice is not None:
        raise ConfigError(f"two loggers would write the same files: give {twice} a separate folder (save_dir=...).")
    for name, folder in folders.items():
        folder.number, folder.chosen, folder.announced, folder.goes_on = numbers.get(name), True, False, goes_on


def _is_former_run(run: Run) -> bool:
    """Whether the run has its checkpoint's run directory without "last": it was started again, or requeued."""
    assert run.resumed_from is not None
    return _absolute(saved_run_dir(run.resumed_from), run.settings) == run.session.run_dir.absolute()


def _begin_folders(run: Run, folders: Mapping[str, LoggerFolder]) -> str | None:
    """Let loggers choose folders without files; return the name of a logger that has another one's folder."""
    places = set()
    for name, folder in folders.items():
        if run.stage == "fit" or folder.announced or not folder.chosen:
            folder.begin()
        place = folder.files, os.path.realpath(folder.log_dir(run.session.run_dir) or "")
        if place in places:
            return name
        places.add(place)
    return None


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
        path, number = root / f"version_{number}", number + 1
        with suppress(FileExistsError):
            path.mkdir()
            sync_directory(root)
            atexit.register(_remove_if_empty, path.absolute(), os.getpid())
            return path


def _remove_if_empty(run_dir: Path, process: int) -> None:
    """Remove a run directory into which neither trainer nor user has written; in the process that made it."""
    if os.getpid() == process:  # not in a fork of it
        with suppress(OSError):
            run_dir.rmdir()


def _delete_leftovers(run_dir: Path) -> None:
    """Delete the remains of a killed run's first checkpoint: no run continues there, so no other would delete them."""
    folder = run_dir / CHECKPOINTS
    with suppress(CheckpointError, OSError):
        if not folder.is_symlink():
            CheckpointDirectory(folder).clean()


def _run_dir_of(checkpoint: StoragePath, settings: Settings) -> Path | None:
    """Return the run directory of the run that wrote `checkpoint`; None if it is not below `default_root_dir`.

    A checkpoint may come from a stranger, so its content must not decide where files are written.
    """
    is_beside = isinstance(checkpoint, Path) and checkpoint.parent.name == CHECKPOINTS
    beside = Path(str(checkpoint.parent.parent)) if is_beside else None
    if beside is not None and beside.resolve().parent == settings.root.resolve():
        return beside
    try:
        path = _absolute(saved_run_dir(checkpoint), settings)
        inside = path.parent.resolve() == settings.root.resolve()
        return path if inside and path in versions(path.parent) and path.is_dir() else beside
    except (OSError, ValueError):  # no path of this machine
        return beside


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
                folders = [run.session.run_dir, *(one for one in _dirpaths(run) if isinstance(one, Path))]
                for folder in {real_path(folder): folder for folder in folders}.values():
                    problem = problem or _lock(folder, locks, run.session.argument("ckpt_path", "last"))
            problem = run.strategy.processes.broadcast_object(problem)
            if problem is not None:
                raise ConfigError(problem)
            yield
    except BaseException:
        if trains:  # a run that failed before it has written anything leaves no directory, which would be the newest
            _remove_if_empty(run.session.run_dir, os.getpid())
        raise


def _lock(folder: Path, locks: ExitStack, last: str) -> str | None:
    """Lock a folder until `locks` are closed; return the problem, or None. `last`: the argument that resumes."""
    lock = FolderLock(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holder = lock.acquire()
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror}). Give another folder: default_root_dir=, or dirpath=."
    if holder is None:
        locks.callback(lock.release)
        return None
    return (
        f"{folder} is in use: {holder} is training there, and two runs in one folder would delete each other's "
        f"checkpoints. Wait for it, or write elsewhere: leave {last} out, or give another default_root_dir or dirpath."
    )


def saved_run_dir(checkpoint: StoragePath) -> str:
    """Return the run directory of the run that wrote a checkpoint; empty if the checkpoint does not name it."""
    run_dir = read_metadata(checkpoint).get("run_dir")
    return run_dir if isinstance(run_dir, str) else ""
