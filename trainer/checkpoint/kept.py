"""The checkpoints that one ModelCheckpoint keeps in its folder: names, writes, "last" and "best", and deletions.

The order of a save protects from a kill at any point of it: the new checkpoint is committed, then the pointers are set,
then old ones are deleted. The state in the new one lists also what is to be deleted, so that a resumed run deletes it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.async_writer import IDLE_WRITER, BackgroundWriter, being_written
from trainer.checkpoint.directory import CheckpointDirectory, step_of
from trainer.checkpoint.disk import ReadError, WriteError, reason
from trainer.checkpoint.left_out import LEFT_OUT
from trainer.checkpoint.lightning_file import FilesBeside, file_of, is_beside, link_last, remove_beside
from trainer.checkpoint.manifest import checkpoints_in, is_committed, manifest_or_damage
from trainer.checkpoint.process_group import ProcessGroup
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.checkpoint.storage import StoragePath, storage_of
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import CheckpointError

log = logging.getLogger("trainer")

STATE = {
    "kept": {str: (NUMBER, None)},
    "best": (str, None),
    "last": (str, None),
    "saved_step": Integer(-1),
    "nonfinite?": [str],
    "owner?": str,
}


@dataclass(frozen=True)
class Listed:
    """A list of checkpoints at one moment."""

    kept: dict[str, float | None] = field(default_factory=dict)
    """Names, oldest first, with their monitored values."""
    nonfinite: Collection[str] = ()
    """The names of those whose states are not finite."""
    last: str | None = None
    """The newest one whose state is finite."""
    step: int = -1
    """The step of the newest one."""

    @property
    def newest(self) -> str | None:
        """The newest name."""
        return next(reversed(self.kept), None)

    def without(self, names: Collection[str]) -> Listed:
        """Return the list without some names."""
        kept = {name: value for name, value in self.kept.items() if name not in names}
        return Listed(kept, [name for name in self.nonfinite if name in kept], self.last, self.step)

    def plus(self, name: str, value: float | None, step: int, finite: bool) -> Listed:
        """Return the list with a new checkpoint at its end."""
        kept = {**self.kept, name: value}
        if finite:
            return Listed(kept, self.nonfinite, name, step)
        return Listed(kept, [*self.nonfinite, name], self.last, step)


class KeptCheckpoints:
    """The checkpoints of one ModelCheckpoint in a folder. Other checkpoints there are never replaced or deleted.

    All processes have the same list; rank 0 writes the pointers and deletes. A save is `begin`, `choose`, `add` and
    `write`, then `commit_list` or, if it fails, `roll_back`.

    Args:
        folder: where the checkpoints are; need not exist.
        retention: which are kept.
        in_background: write in a thread, on this process.
        files: writes and removes single files beside the folders; None: there are only folders.
        links_last: also make `last.ckpt` a link to the newest file.
    """

    def __init__(
        self,
        folder: StoragePath,
        retention: Retention,
        in_background: bool = False,
        files: FilesBeside | None = None,
        links_last: bool = False,
    ) -> None:
        self.folder = folder
        self.files, self._links_last = files, links_last
        self.in_background = in_background
        self.writer = BackgroundWriter() if in_background else IDLE_WRITER
        self.listed = Listed()
        self.before = Listed()
        """The list before the newest write, restored if that fails."""
        self.loaded = False
        """True if the list comes from a checkpoint."""
        self.write_seconds: float | None = None
        """The duration of the newest committed write."""
        self._retention = retention
        self._owner = os.urandom(8).hex()
        """A name in the manifests of the checkpoints that may be deleted or replaced."""
        self._obsolete: list[str] = []
        """The checkpoints to delete when the newest one is committed."""
        self._undeleted: list[str] = []
        """Obsolete checkpoints that could not be deleted, and what failed writes may have left; on rank 0."""
        self._written_later: set[str] = set()
        """Names of checkpoints that this run wrote after the one it was resumed from: it writes them again."""
        self._writes = 0
        self._sent: list[str] = []  # keys of the exchanges of background writes

    # -- which there are -----------------------------------------------------------------------------------------------

    @property
    def best(self) -> str | None:
        """The best checkpoint by its value; None without one."""
        return next(iter(self.best_names()), None)

    def best_names(self) -> list[str]:
        """Return the best checkpoints by their values, best first."""
        remaining = self._remaining()
        return self._retention.best(remaining.kept, remaining.nonfinite)

    def _remaining(self) -> Listed:
        """Return the list after the commit of the newest checkpoint, which may have the name of an old one."""
        return self.listed.without([name for name in self._obsolete if name != self.listed.newest])

    def newest_committed(self) -> StoragePath | None:
        """Return the newest finite checkpoint on the disk; waits for one that is being written."""
        self.writer.wait()
        paths = [self.folder / name for name in (self.listed.last, self.before.last) if name]
        return next((path for path in paths if is_committed(path)), None)

    def describe_former(self) -> str:
        """Return a sentence about the checkpoint before the newest write, for the message that this has failed."""
        return f"The last checkpoint that was written: {self.before.last or 'none'}."

    def state_dict(self) -> dict[str, Any]:
        """Return the list for a checkpoint, with what could not be deleted: a resumed run tries again."""
        listed = self.listed
        kept = {**dict.fromkeys(self._undeleted), **listed.kept}
        state = {"kept": kept, "best": self.best, "last": listed.last, "saved_step": listed.step, "owner": self._owner}
        return {**state, "nonfinite": list(listed.nonfinite)} if listed.nonfinite else state

    def load_state_dict(self, state: Mapping[str, Any], step: float, same_run: bool) -> None:
        """Restore the list, of the checkpoints that are still there.

        Also takes into the list what the saved state could not know of: checkpoints of the same step, which were
        written after it, and those that are not finite, after which the run was resumed from the last finite one.

        Args:
            step: of the checkpoint that holds the state.
            same_run: the run that wrote the state has the same run directory. Its later checkpoints are replaced when
                they come again; another run's stay.

        Raises:
            CheckpointError: the state is not one of a ModelCheckpoint.
            ReadError: the storage does not answer.
        """
        require(state, STATE, "ModelCheckpoint")
        self.loaded, self._owner = True, state.get("owner", self._owner)
        infos = self._infos()
        steps = {name: step_of(info) for name, info in infos.items()}
        values = {**state["kept"], **self.listed.kept}
        kept = {name: value for name, value in values.items() if steps.get(name, math.inf) <= step}
        # A user's copy has another name, and a user's own checkpoint has no owner.
        own = [name for name, info in infos.items() if (info.get("name"), info.get("owner")) == (name, self._owner)]
        for name in own:
            if name not in kept and (steps[name] == step or infos[name].get("nonfinite")):
                kept[name] = values.get(name)
        self._written_later = {name for name in own if same_run and steps[name] > step and name not in kept}
        nonfinite = [name for name in kept if infos[name].get("nonfinite")]
        last = next((name for name in (self.listed.last, state["last"]) if name in kept), None)
        newest = max([state["saved_step"], *(int(steps[name]) for name in kept if steps[name] <= step)])
        self.listed, self._obsolete = Listed(kept, nonfinite, last, newest), []

    # -- one save ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note the list before a save."""
        self.before = self.listed

    def would_keep(self, value: float | None, again: bool) -> bool:
        """Whether a new checkpoint is worth writing; see `choose`."""
        return "" not in self._to_delete(value, again, finite=True)

    def choose(self, value: float | None, again: bool, finite: bool) -> None:
        """Choose the checkpoints to delete when the new one is committed.

        Args:
            value: the monitored value of the new one.
            again: the new one takes the place of the newest, which is of the same step.
            finite: the state of the new one is finite. One that is not never takes the place of a finite one.
        """
        self._obsolete = self._to_delete(value, again, finite)

    def _to_delete(self, value: float | None, again: bool, finite: bool) -> list[str]:
        """Return the checkpoints to delete for a new one, including "", the new one, if it is not worth keeping."""
        newest, nonfinite = self.listed.newest, self.listed.nonfinite
        replaced = [newest] if again and newest is not None and (finite or newest in nonfinite) else []
        with_new = self.listed.without(replaced).plus("", value, self.listed.step, finite)
        return self._retention.to_delete(with_new.kept, with_new.nonfinite) + replaced

    def free_name(self, name: str) -> str | WriteError:
        """Return the name for the new checkpoint, with a version if it is taken; called on rank 0.

        An error is returned, not raised, for all processes to raise it.
        """
        candidate, version = name, 1
        try:
            while not self._is_free(candidate):
                candidate, version = f"{name}-v{version}", version + 1
        except (OSError, ReadError) as error:
            return WriteError(f"cannot write the checkpoint {self.folder / candidate}: {reason(error)}")
        return candidate

    def add(self, name: str, value: float | None, step: int, finite: bool) -> dict[str, Any]:
        """Enter the new checkpoint into the list; return the entries of its info that identify it."""
        self.listed = self.listed.without([name]).plus(name, value, step, finite)
        # A process that was killed before it could set "last" leaves a checkpoint that follows the one there.
        return {"follows": self.before.last, "owner": self._owner, "name": name}

    def _is_free(self, name: str) -> bool:
        path = self.folder / name
        if str(path) in being_written:  # by another callback: the storage does not have it yet
            return False
        if not storage_of(path).path_in_use(path):
            return self.files is None or not file_of(path).exists()
        return name in {*self._obsolete, *self._written_later} and self._own_info(path) is not None

    def write(
        self,
        state: Mapping[str, Any],
        info: Mapping[str, Any],
        group: ProcessGroup,
        group_of_thread: Callable[[str, list[str]], ProcessGroup],
        moves_last: bool,
        moves_best: bool,
    ) -> None:
        """Write the newest checkpoint of the list, here or in the background; then set the pointers and delete.

        Args:
            group: the processes that write together.
            group_of_thread: makes that group for a thread, from a name and a list that all writes share.
            moves_last, moves_best: whether "last" and "best" belong to these checkpoints.

        Raises:
            WriteError: the checkpoint or a pointer cannot be written. In the background the writer has the error.
        """
        name = [*self.listed.kept][-1]
        path, overwrite = self.folder / name, name in {*self._obsolete, *self._written_later}
        # Earlier checkpoints may have what this one had to leave out.
        obsolete = [] if LEFT_OUT in info else [one for one in self._obsolete if one != name]
        last = name if moves_last and name == self.listed.last else None
        best, begun = self.best, time.monotonic()

        def commit() -> None:
            self.write_seconds = time.monotonic() - begun
            if group.rank == 0:
                self._write_beside(path)
                self._set_pointers(name, last, best, moves_best)
                self._delete(obsolete, name)

        if not self.in_background:
            write_checkpoint(path, state, info=info, overwrite=overwrite, process_group=group)
            commit()
            return
        self._writes += 1
        thread_group = group_of_thread(f"writing/{path}/{self._writes}", self._sent)
        self.writer.start(path, state, info, commit, group, thread_group, overwrite)

    def _write_beside(self, folder: StoragePath) -> None:
        if self.files is not None and isinstance(folder, Path):
            try:
                self.files.write(folder)
            except CheckpointError as error:
                raise WriteError(f"{folder} was written, and {reason(error)}. 'last' finds the folder.") from error

    def write_missing_files(self) -> None:
        """Write the files that the former process could not write any more, or wrote only the folders of."""
        for name in self.listed.kept:
            path = self.folder / name
            if not is_beside(path):
                try:
                    self._write_beside(path)
                except WriteError as error:
                    log.warning("%s", error)

    def _set_pointers(self, name: str, last: str | None, best: str | None, moves_best: bool) -> None:
        directory = CheckpointDirectory(self.folder)
        try:
            if last is not None:
                directory.set_pointer("last", last)
                if self._links_last and self.files is not None:
                    link_last(self.folder / last)
            if moves_best and (best is not None or directory.pointer("best")):  # an earlier run's
                directory.set_pointer("best", best)
        except (WriteError, ReadError, OSError) as error:
            raise WriteError(f"{self.folder / name} was written, and {reason(error)}. 'last' finds it.") from error

    def _delete(self, obsolete: list[str], newest: str) -> None:
        """Delete checkpoints, also those whose deletion failed before; keep the names that still have to be deleted."""
        before, self._undeleted = self._undeleted, []
        for old in dict.fromkeys([*before, *obsolete]):
            try:
                # Another callback may have taken the name of a checkpoint that is gone.
                if old != newest and self._own_info(self.folder / old) is not None:
                    (remove_beside if self.files is None else self.files.remove)(self.folder / old)
                    CheckpointDirectory(self.folder).remove(old)
            except CheckpointError as error:
                self._undeleted.append(old)
                if old not in before:
                    log.warning("a checkpoint that is no longer kept stays until it can be deleted: %s", reason(error))

    def commit_list(self) -> None:
        """Take what is deleted off the list; in the background before it happens."""
        self.listed, self._obsolete = self._remaining(), []

    def roll_back(self, failed: bool) -> None:
        """Restore the list before the newest save; `failed`: delete later what there may be of the new checkpoint."""
        newest, self.listed, self._obsolete = self.listed.newest, self.before, []
        if failed and newest is not None and newest not in self.listed.kept:
            self._undeleted.append(newest)

    def _infos(self) -> dict[str, dict[str, Any]]:
        """Return the infos of all checkpoints that this callback has written, by name; see `_own_info`."""
        return {path.name: info for path in checkpoints_in(self.folder) if (info := self._own_info(path)) is not None}

    def _own_info(self, path: StoragePath) -> dict[str, Any] | None:
        """Return the info of a checkpoint that this callback has written; None if there is none, or another's.

        A damaged checkpoint, known by its name alone, and one that does not name its owner count as written by it.

        Raises:
            ReadError: the storage does not answer.
        """
        if not is_committed(path):
            return None
        manifest = manifest_or_damage(path)
        info = {} if isinstance(manifest, CheckpointError) else manifest.info
        return info if info.get("owner", self._owner) == self._owner else None
