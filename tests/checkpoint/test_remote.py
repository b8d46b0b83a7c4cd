"""Checkpoints in storage without rename: fsspec's memory, and a folder that behaves like an object store."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers.saving import At, fit, steps, there
from tests.messages import raises_recorded
from trainer import Engine
from trainer.callbacks import OnExceptionCheckpoint
from trainer.checkpoint import remote
from trainer.checkpoint.directory import CheckpointDirectory, locate
from trainer.checkpoint.disk import ReadError, WriteError
from trainer.checkpoint.format import open_checkpoint, read_checkpoint
from trainer.checkpoint.manifest import is_committed, read_manifest, read_metadata, verify_checkpoint, with_checksum
from trainer.checkpoint.remote import RemotePath
from trainer.checkpoint.storage import as_storage_path
from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.checkpoint.find import checkpoint_folders, listing
from trainer.errors import CheckpointError, ConfigError


class Objects(LocalFileSystem):
    """A file system of objects that can be written, read and deleted, without renames or folders."""

    protocol = "objects"

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an object store has no rename")

    mv_file = cp_file = mkdir = mv

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise PermissionError("not allowed")

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode:
            os.makedirs(os.path.dirname(self._strip_protocol(path)), exist_ok=True)
        return super().open(path, mode, **kwargs)


@pytest.fixture(params=["memory", "objects"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    fsspec.register_implementation("objects", Objects, clobber=True)
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
    # All instances in a process share their contents.
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return RemotePath(f"objects://{tmp_path}/run" if request.param == "objects" else "memory://bucket/run")


def objects(folder: RemotePath) -> list[str]:
    """Return all objects by their path below the folder."""
    with folder._open_store() as (store, path):
        found = store.find(path)
    return sorted(str(entry)[len(path) + 1 :] for entry in found)


def state(number: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), number)}, "optimizers": [torch.ones(2)], "step": number}


def add(folder: RemotePath, name: str, step: int) -> RemotePath:
    write_checkpoint(folder / name, state(step), info={"step": step})
    return folder / name


def change(path: RemotePath, edit: Callable[[bytes], bytes]) -> None:
    with path._open_store() as (store, place):
        store.pipe_file(place, edit(store.cat_file(place)))


def test_what_is_written_is_read(
    folder: RemotePath, random_state: Callable[[int], dict[str, Any]], assert_same: Callable[[Any, Any], None]
) -> None:
    for seed in range(3):
        given = random_state(seed)
        write_checkpoint(f"{folder}/{seed}/", given, info={"step": seed})
        assert_same(read_checkpoint(folder / str(seed)), given)
        assert verify_checkpoint(f"{folder}/{seed}") == []
    assert read_metadata(f"{folder}/2").keys() == given.keys()


def test_the_manifest_comes_last_and_goes_first(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []
    store_class = type(fsspec.core.url_to_fs(str(folder))[0])
    open_, remove = store_class.open, store_class.rm_file

    def spy_open(self: Any, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "wb":
            seen.append((path.rpartition("/")[2], [one.name for one in CheckpointDirectory(folder).list()]))
        return open_(self, path, mode, **kwargs)

    def spy_remove(self: Any, path: str) -> None:
        remove(self, path)
        seen.append((path.rpartition("/")[2], [one.name for one in CheckpointDirectory(folder).list()]))

    monkeypatch.setattr(store_class, "open", spy_open)
    monkeypatch.setattr(store_class, "rm_file", spy_remove)
    add(folder, "a", 1)
    names = ["model.safetensors", "optimizers.safetensors", "checkpoint.json", "manifest.json"]
    assert seen == [(name, []) for name in names]
    add(folder, "b", 2)
    seen.clear()
    CheckpointDirectory(folder).remove("a")
    assert seen[0] == ("manifest.json", ["b"])
    assert not [name for name in objects(folder) if name.startswith("a")]


def test_a_directory_lists_points_resolves_and_removes(folder: RemotePath, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointDirectory(str(folder))
    assert store.list() == []
    with raises_recorded(CheckpointError):
        store.resolve("last")
    for name, step in (("c", 2), ("b", 10), ("a", 30)):
        add(folder, name, step)
    store.set_pointer("last", "a")
    store.set_pointer("best", folder / "c")
    assert store.list() == [folder / "c", folder / "b", folder / "a"]
    assert store.info(f"{folder}/b") == {"step": 10}
    assert store.resolve("last") == folder / "a"
    assert store.resolve("best") == folder / "c"
    assert store.resolve("b") == store.resolve(f"{folder}/b") == folder / "b"
    change(folder / "a" / "model.safetensors", lambda data: data[:-1] + b"x")
    assert store.resolve("last") == folder / "b"
    assert f"{folder}/a/model.safetensors is damaged" in caplog.text
    for name in ("missing", "../x", "memory://elsewhere/b"):
        with pytest.raises(CheckpointError):
            store.remove(name)
    with raises_recorded(CheckpointError):
        store.resolve(f"{folder}/bb")
    for name in ("a", "c"):
        store.remove(name)
    with raises_recorded(CheckpointError):
        store.remove("b")


def test_a_folder_without_a_manifest_counts_for_nothing(folder: RemotePath) -> None:
    add(folder, "unbroken", 1)
    add(folder, "half", 2)
    with (folder / "half" / "manifest.json")._open_store() as (store, path):
        store.rm_file(path)
    assert CheckpointDirectory(folder).list() == [folder / "unbroken"]
    assert not is_committed(folder / "half")
    with raises_recorded(CheckpointError):
        read_checkpoint(folder / "half")
    # The same name can be used again, and nothing of the former write stays.
    write_checkpoint(folder / "half", {"x": 1})
    assert verify_checkpoint(folder / "half") == []


def test_leftovers_go_when_they_are_old(folder: RemotePath) -> None:
    add(folder, "unbroken", 1)
    for name in ("half/model.safetensors", "half/checkpoint.json", "notes/text.txt"):
        with folder._open_store() as (store, path), store.open(f"{path}/{name}", "wb") as file:
            file.write(b"x")
    CheckpointDirectory(folder).set_pointer("last", "unbroken")
    before = objects(folder)
    assert CheckpointDirectory(folder).clean() == []
    assert objects(folder) == before
    assert CheckpointDirectory(folder).clean(max_age=-1) == [folder / "half"]
    assert objects(folder) == [name for name in before if not name.startswith("half")]
    assert CheckpointDirectory(folder / "none").clean() == []


def test_a_checkpoint_is_replaced_when_the_new_one_is_complete(folder: RemotePath) -> None:
    for step in range(1, 4):
        write_checkpoint(folder / "a", state(step), info={"step": step}, overwrite=True)
        assert read_checkpoint(folder / "a")["step"] == read_metadata(folder / "a")["step"] == step
        assert verify_checkpoint(folder / "a") == []
        assert [(path.name, read_manifest(path).info) for path in CheckpointDirectory(folder).list()] == [
            ("a", {"step": step})
        ]
        named = json.loads((folder / "a" / "manifest.json").read_bytes()).get("folder", "")
        assert bool(named) == (step > 1)  # a first one is written as ever
        names = ["checkpoint.json", "manifest.json", "model.safetensors", "optimizers.safetensors"]
        inner = [f"a/{named}/{name}" for name in names] if named else []
        assert objects(folder) == sorted([*inner, "a/manifest.json"] if named else [f"a/{name}" for name in names])
    tensor = open_checkpoint(folder / "a", None, verify=True)["model"]["w"]
    assert tensor.read().tolist() == [3.0] * 300
    CheckpointDirectory(folder).set_pointer("last", "a")
    assert CheckpointDirectory(folder).resolve("last") == folder / "a"
    change(folder / "a" / named / "model.safetensors", lambda data: data[:-1] + b"x")
    assert [problem.partition(" is ")[0] for problem in verify_checkpoint(folder / "a")] == [
        f"{folder}/a/{named}/model.safetensors"
    ]
    RemotePath(f"{folder}/a").delete(recursive=True)
    assert objects(folder) == ["last.json"]


@pytest.mark.parametrize("given", ["../b", "", 3, None, ".new-0123456"])
def test_a_manifest_names_no_folder_but_its_own(given: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", state(1))
    body = json.loads((tmp_path / "a" / "manifest.json").read_bytes())
    body.pop("seal")
    (tmp_path / "a" / "manifest.json").write_bytes(with_checksum({**body, "folder": given}))
    if given is None:
        assert read_checkpoint(tmp_path / "a")["step"] == 1
        return
    with raises_recorded(CheckpointError):
        read_checkpoint(tmp_path / "a")


def test_a_checkpoint_that_was_replaced_can_be_copied_to_a_disk(folder: RemotePath, tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(folder / "a", state(step), overwrite=True)
    for name in objects(folder / "a"):
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes((folder / "a" / name).read_bytes())
    assert read_checkpoint(tmp_path / "copy")["step"] == 2
    write_checkpoint(tmp_path / "copy", state(3), overwrite=True)
    assert verify_checkpoint(tmp_path / "copy") == []


def test_the_engine_saves_at_one_url_again_and_again(folder: RemotePath) -> None:
    kept = torch.empty(0)
    for resume in (False, True):
        with Engine(accelerator="cpu", devices=1, seed=1) as engine:
            net = torch.nn.Linear(1, 1)
            model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
            values = {"model": model, "optimizer": optimizer, "step": 0}
            loader = engine.setup_dataloaders([torch.ones(2, 1)] * 3)
            if resume:
                engine.load(f"{folder}/last", values)
                assert values["step"] == 3
                assert (loader.epoch, loader.batch) == (0, 3)
                assert torch.equal(net.weight, kept)
            for batch in loader:
                engine.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                values["step"] += 1
                engine.save(f"{folder}/last", values)
            kept = net.weight.detach().clone()


def test_a_fixed_name_is_replaced(folder: RemotePath) -> None:
    checkpoint = {"dirpath": str(folder), "filename": "model", "save_top_k": 1}
    fit([steps(**checkpoint)], 8, max_steps=3)
    assert there(str(folder)) == ["model"]
    assert fit([steps(**checkpoint)], 8, max_steps=5, ckpt_path="last").global_step == 5
    assert there(str(folder)) == ["model"]
    assert read_checkpoint(folder / "model", ["progress"])["progress"]["step"] == 5


class ReadOnly(MemoryFileSystem):
    """A store from which can only be read."""

    protocol = "readonly"

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            raise NotImplementedError
        return super().open(path, mode, **kwargs)


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    fsspec.register_implementation("readonly", ReadOnly, clobber=True)
    # Without aiohttp fsspec has no http.
    for url in ("readonly://bucket/run", *["http://127.0.0.1:9/run"] * bool(find_spec("aiohttp"))):
        for callback in (steps(dirpath=url), OnExceptionCheckpoint(url)):
            trained: list[int] = []
            with raises_recorded(ConfigError):
                fit([callback, At(step1=lambda trainer: trained.append(1))], 8, max_steps=2)  # noqa: B023
            assert trained == []
    with raises_recorded(WriteError):
        write_checkpoint("readonly://bucket/run/a", state(1))


def test_what_cannot_be_replaced_stays(folder: RemotePath) -> None:
    add(folder, "a", 1)
    with raises_recorded(CheckpointError):
        add(folder, "a", 2)
    with folder._open_store() as (store, path), store.open(f"{path}/mine/notes.txt", "wb") as file:
        file.write(b"x")
    for overwrite in (False, True):
        with raises_recorded(CheckpointError):
            write_checkpoint(folder / "mine", state(2), overwrite=overwrite)
    assert read_checkpoint(folder / "a")["step"] == 1


@pytest.mark.parametrize("error", [ConnectionError("gone"), RuntimeError("a client library's own"), BrokenPipeError()])
def test_a_store_that_refuses_leaves_the_earlier_checkpoint(
    folder: RemotePath, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointDirectory(folder)
    add(folder, "old", 1)
    store.set_pointer("last", "old")
    store_class = type(fsspec.core.url_to_fs(str(folder))[0])
    with monkeypatch.context() as patch:
        open_ = store_class.open

        def refuse(self: Any, path: str, mode: str = "rb", **kwargs: Any) -> Any:
            if mode == "wb" and path.endswith("checkpoint.json"):
                raise error
            return open_(self, path, mode, **kwargs)

        def refuse_pipe(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
            raise error

        patch.setattr(store_class, "open", refuse)
        patch.setattr(store_class, "pipe_file", refuse_pipe)
        with raises_recorded(WriteError):
            add(folder, "new", 2)
        with raises_recorded(WriteError):
            store.set_pointer("best", "old")
    assert store.resolve("last") == folder / "old"
    assert store.list() == [folder / "old"]
    add(folder, "new", 3)
    assert read_checkpoint(folder / "new")["step"] == 3


def test_a_network_that_fails_while_reading_is_reported(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    add(folder, "a", 1)
    store_class = type(fsspec.core.url_to_fs(str(folder))[0])

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("timed out")

    monkeypatch.setattr(store_class, "open", refuse)
    with raises_recorded(CheckpointError):
        read_checkpoint(folder / "a")


KILLED = """
import os, sys
from tests.checkpoint.test_remote import Objects, RemotePath, add, fsspec
from trainer.checkpoint.directory import CheckpointDirectory

fsspec.register_implementation("objects", Objects)
for fault in sys.argv[2:]:
    folder = RemotePath(f"objects://{sys.argv[1]}/{fault.replace('=', '_').replace(':', '_')}")
    add(folder, "old", 1)
    CheckpointDirectory(folder).set_pointer("last", "old")
    child = os.fork()
    if child == 0:
        os.environ["TRAINER_FAULT"] = fault
        add(folder, "new", 2)
        CheckpointDirectory(folder).set_pointer("last", "new")
        CheckpointDirectory(folder).remove("old")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), fault
"""

FAULTS = {
    "in_file:1=kill": ["old"],
    "after_file:2=kill": ["old"],
    "before_manifest:1=kill": ["old"],
    "after_file:4=kill": ["old", "new"],
    "before_pointer:1=kill": ["old", "new"],
    "after_pointer:1=kill": ["old", "new"],
    "in_removal:1=kill": ["new"],
}


def test_a_killed_writer_leaves_complete_checkpoints_or_nothing(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), *FAULTS],
        check=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    fsspec.register_implementation("objects", Objects, clobber=True)
    for fault, left in FAULTS.items():
        folder = RemotePath(f"objects://{tmp_path}/{fault.replace('=', '_').replace(':', '_')}")
        store = CheckpointDirectory(folder)
        assert [path.name for path in store.list()] == left, fault
        assert store.newest_valid() == folder / left[-1]
        expected = "new" if fault.startswith(("after_pointer", "in_removal")) else "old"
        assert json.loads((folder / "last.json").read_bytes()) == {"checkpoint": expected}, fault
        if "new" not in left:
            add(folder, "new", 2)  # a resumed run writes the same name
        assert verify_checkpoint(folder / "new") == []


REPLACED = """
import os, sys
from tests.checkpoint.test_remote import Objects, RemotePath, fsspec, state, write_checkpoint

fsspec.register_implementation("objects", Objects)
for before in (1, 2):
    for number, fault in enumerate(sys.argv[2:]):
        path = RemotePath(f"objects://{sys.argv[1]}/{before}-{number}/a")
        for step in range(1, before + 1):
            write_checkpoint(path, state(step), info={"step": step}, overwrite=True)
        child = os.fork()
        if child == 0:
            os.environ["TRAINER_FAULT"] = fault
            write_checkpoint(path, state(9), info={"step": 9}, overwrite=True)
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), fault
"""


def test_a_writer_that_is_killed_while_it_replaces_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    faults = ["in_file:1", "after_file:2", "before_manifest:1", "after_file:4", "before_pointer:1", "after_pointer:1"]
    subprocess.run(
        [sys.executable, "-c", REPLACED, str(tmp_path), *(f"{fault}=kill" for fault in faults)],
        check=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    fsspec.register_implementation("objects", Objects, clobber=True)
    for before in (1, 2):
        for number, fault in enumerate(faults):
            run = RemotePath(f"objects://{tmp_path}/{before}-{number}")
            assert read_checkpoint(run / "a")["step"] == (9 if fault == "after_pointer:1" else before)
            assert verify_checkpoint(run / "a") == []
            write_checkpoint(run / "a", state(3), overwrite=True)
            assert verify_checkpoint(run / "a") == []
            assert len(objects(run)) == 5
            (run / "a" / "manifest.json").delete()  # as a removal that was interrupted
            assert CheckpointDirectory(run).clean(max_age=-1.0) == [run / "a"]
            assert objects(run) == []


def test_places(tmp_path: Path) -> None:
    assert as_storage_path("runs/x") == as_storage_path(Path("runs/x")) == Path("runs/x")
    assert as_storage_path(f"file://{tmp_path}/x") == as_storage_path(f"local://{tmp_path}/x") == tmp_path / "x"
    remote = as_storage_path("memory://bucket/x/")
    assert remote == as_storage_path(remote) == RemotePath("memory://bucket/x")
    assert (remote.name, remote.parent, remote / "y") == (
        "x",
        as_storage_path("memory://bucket"),
        RemotePath(f"{remote}/y"),
    )
    assert as_storage_path("memory://") == as_storage_path("memory:///") == RemotePath("memory://")
    root = RemotePath("memory://bucket").parent
    assert root == root.parent == RemotePath("memory://")
    assert root / "bucket" == RemotePath("memory://bucket")


@pytest.mark.parametrize(
    "given", [Path("s3://bucket/run"), "nosuch://bucket/run", "ftp://127.0.0.1:1/run", "reference://x"], ids=str
)
def test_places_that_cannot_be(given: Any) -> None:
    with raises_recorded(ConfigError):
        as_storage_path(given)


def test_a_message_names_the_argument() -> None:
    for given in ("s3:/bucket", Path("s3://bucket")):
        with raises_recorded(ConfigError):
            as_storage_path(given, "dirpath")


def test_a_scheme_without_its_package_names_the_package() -> None:
    missing = [name for name in ("s3", "gs", "abfs") if _missing(name)]
    if not missing:
        pytest.skip("all of them are installed")
    with pytest.raises(ConfigError, match=r"(?i)install"):
        as_storage_path(f"{missing[0]}://bucket/run")


def _missing(scheme: str) -> bool:
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        return True
    return False


def test_the_runs_of_a_copied_root_are_found(folder: RemotePath) -> None:
    for run in ("version_10", "version_2"):
        add(folder / run / "checkpoints", "a", 1)
    (folder / "notes.txt").call(lambda store, key: store.pipe_file(key, b"words"))
    assert checkpoint_folders(str(folder)) == [folder / run / "checkpoints" for run in ("version_2", "version_10")]
    listed = listing(folder / "version_2" / "checkpoints", contents=True)
    assert [(found.path.name, found.damage, found.written is not None) for found in listed] == [("a", [], True)]


def test_times_are_those_of_the_store(folder: RemotePath) -> None:
    written = (add(folder, "a", 1) / "manifest.json").modified()
    assert written is not None
    assert abs(written - time.time()) < 60


class Flaky(Objects):
    """An object store of which every operation may fail, in `share` of the cases, before or after it was done."""

    protocol = "flaky"
    rng = random.Random(0)
    share = 0.0
    errors = 0

    def _maybe(self, operation: Callable[[], Any]) -> Any:
        fails = Flaky.rng.random() < Flaky.share
        result = None if fails and Flaky.rng.random() < 0.5 else operation()
        if fails:
            Flaky.errors += 1
            raise Flaky.rng.choice(
                [ConnectionResetError("reset"), OSError(5, "Input/output error"), KeyError("SlowDown")]
            )
        return result

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return self._maybe(lambda: super(Flaky, self).open(path, mode, **kwargs))

    def rm_file(self, path: str) -> None:
        self._maybe(lambda: super(Flaky, self).rm_file(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        self._maybe(lambda: super(Flaky, self).rm(path, recursive, maxdepth))

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._maybe(lambda: super(Flaky, self).info(path, **kwargs))

    def isfile(self, path: str) -> Any:
        return self._maybe(lambda: super(Flaky, self).isfile(path))

    def isdir(self, path: str) -> Any:
        return self._maybe(lambda: super(Flaky, self).isdir(path))

    def exists(self, path: str, **kwargs: Any) -> Any:
        return self._maybe(lambda: super(Flaky, self).exists(path, **kwargs))

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        return self._maybe(lambda: super(Flaky, self).ls(path, detail, **kwargs))

    def modified(self, path: str) -> Any:
        return self._maybe(lambda: super(Flaky, self).modified(path))


class Forgetful(MemoryFileSystem):
    """A store whose lists lack manifests and contain a marker of the directory."""

    protocol = "forgetful"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        found = [one for one in super().ls(path, detail=True) if not one["name"].endswith("manifest.json")]
        found.insert(0, {"name": f"{self._strip_protocol(path)}/", "type": "directory", "size": 0})
        return found if detail else [one["name"] for one in found]


def test_a_list_that_is_not_complete_deletes_and_overwrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("forgetful", Forgetful, clobber=True)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    run = RemotePath("forgetful://bucket/run")
    path = add(run, "step=1", 1)
    assert [entry.name for entry in run.iterdir()] == ["step=1"]
    assert CheckpointDirectory(run).clean(max_age=-1.0) == []
    assert remote.RemoteStorage().path_in_use(path)
    assert verify_checkpoint(path) == []


@pytest.fixture
def flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(remote, "PAUSES", (0.0,) * 6)
    monkeypatch.setattr(Flaky, "rng", random.Random(0))
    yield RemotePath(f"flaky://{tmp_path}/run")
    Flaky.share, Flaky.errors = 0.0, 0


def test_errors_that_pass_change_nothing(flaky: RemotePath) -> None:
    Flaky.share = 0.05
    store = CheckpointDirectory(flaky)
    for number in range(20):
        add(flaky, str(number), number)
        store.set_pointer("last", str(number))
        if number > 1:
            store.remove(str(number - 2))
        assert store.resolve("last") == flaky / str(number)
        assert read_checkpoint(flaky / str(number))["step"] == number
        assert store.clean() == []
    assert Flaky.errors > 20
    Flaky.share = 0.0
    assert [path.name for path in store.list()] == ["18", "19"]
    assert {name.partition("/")[0] for name in objects(flaky)} == {"18", "19", "last.json"}
    assert verify_checkpoint(flaky / "19") == []


def test_a_store_that_does_not_answer_is_not_taken_for_damage(flaky: RemotePath) -> None:
    store = CheckpointDirectory(flaky)
    for number in (1, 2):
        add(flaky, str(number), number)
    store.set_pointer("last", "2")
    Flaky.share = 1.0
    calls: list[Callable[[], Any]] = [
        lambda: store.resolve("last"),
        lambda: store.resolve("best"),
        lambda: store.resolve("1"),
        lambda: store.pointer("last"),
        lambda: store.newest_valid(),
        lambda: store.corruption_report(),
        lambda: store.list(),
        lambda: store.info("1"),
        lambda: store.clean(),
        lambda: locate(f"{flaky}/last"),
        lambda: read_checkpoint(flaky / "1"),
        lambda: verify_checkpoint(flaky / "1"),
    ]
    for call in calls:
        with pytest.raises(ReadError):
            call()
    for change_it in (lambda: store.remove("1"), lambda: store.set_pointer("last", "1")):
        with pytest.raises(CheckpointError):
            change_it()
    with raises_recorded(WriteError):
        add(flaky, "3", 3)


def test_a_reset_in_the_newest_checkpoint_alone_does_not_lead_to_an_older_one(
    flaky: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointDirectory(flaky)
    for number in (1, 2):
        add(flaky, str(number), number)
    store.set_pointer("last", "2")
    open_ = Objects.open
    for name in ("manifest.json", "checkpoint.json", "model.safetensors"):

        def reset(self: Any, path: str, mode: str = "rb", name: str = name, **kwargs: Any) -> Any:
            if path.endswith(f"2/{name}"):
                raise ConnectionResetError("reset")
            return open_(self, path, mode, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Objects, "open", reset)
            with raises_recorded(ReadError):
                store.resolve("last")
    assert store.resolve("last") == flaky / "2"


def test_a_connection_that_ends_early_is_opened_again(flaky: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    add(flaky, "1", 1)
    open_, rng = Objects.open, random.Random(0)

    class Short:
        def __init__(self, file: Any) -> None:
            self._file, self.left = file, rng.randrange(2000)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def read(self, size: int) -> bytes:
            size = min(size, self.left)
            self.left -= size
            return bytes(self._file.read(size))

    monkeypatch.setattr(remote, "PAUSES", (0.0,) * 50)
    monkeypatch.setattr(Objects, "open", lambda self, path, mode="rb", **more: Short(open_(self, path, mode, **more)))
    assert read_checkpoint(flaky / "1")["model"]["w"].tolist() == [1.0] * 300
    assert verify_checkpoint(flaky / "1") == []


@pytest.mark.parametrize("async_save", [False, True])
def test_training_goes_on_while_the_store_is_away(
    async_save: bool, flaky: RemotePath, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = steps(dirpath=str(flaky), async_save=async_save, on_write_error="warn")

    def wait() -> None:
        if checkpoint._checkpoints.writer is not None:
            checkpoint._checkpoints.writer.wait()

    away = At(
        step3=lambda trainer: (wait(), setattr(Flaky, "share", 1.0)),
        step5=lambda trainer: (wait(), setattr(Flaky, "share", 0.0)),
    )
    fit([away, checkpoint], 8, max_steps=6)
    assert there(str(flaky)) == ["step=5", "step=6"]
    assert caplog.text.count("SAVING A CHECKPOINT HAS FAILED") == 2
    assert "The last checkpoint that was written: step=2" in caplog.text
    again = steps(dirpath=str(flaky), on_write_error="warn")
    away = At(step7=lambda trainer: setattr(Flaky, "share", 1.0))
    with raises_recorded(WriteError):
        fit([away, again], 8, ckpt_path="last")


def test_trying_again_draws_no_random_number_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
    random.seed(1)
    before, tries = random.getstate(), iter([False, True])

    def fail_once(store: Any, path: str) -> str:
        if not next(tries):
            raise ConnectionResetError("reset by peer")
        return path

    assert RemotePath("memory://bucket/x").call(fail_once).endswith("bucket/x")
    assert random.getstate() == before


class Asked(MemoryFileSystem):
    """A store that asks `info` about each object, which tests let fail."""

    protocol = "asked"

    def isfile(self, path: str) -> bool:
        try:
            return bool(self.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def exists(self, path: str, **kwargs: Any) -> bool:
        return self.isfile(path) or self.isdir(path)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "r" in mode:
            self.info(path)
        return super().open(path, mode, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self.info(path)
        return super().cat_file(path, *args, **kwargs)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    fsspec.register_implementation("asked", Asked, clobber=True)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(remote, "PAUSES", (0.0,) * 3)
    return RemotePath("asked://bucket/run")


def test_a_checkpoint_that_is_listed_by_nobody_is_not_overwritten(
    asked: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add(asked, "1", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Asked, "ls", lambda self, path, detail=True, **kwargs: [])
        with raises_recorded(CheckpointError):
            add(asked, "1", 2)
    assert read_checkpoint(path)["step"] == 1


@pytest.mark.parametrize("failures", [4, 1000])
def test_an_error_after_the_commit_does_not_make_it_undone(
    asked: RemotePath, failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reset(self: Any, path: str, **more: Any) -> Any:
        nonlocal failures
        if path.endswith("manifest.json") and path.strip("/") in {name.strip("/") for name in self.store} and failures:
            failures -= 1
            raise ConnectionResetError("reset")
        return info(self, path, **more)

    info = Asked.info
    with monkeypatch.context() as patch:
        patch.setattr(Asked, "info", reset)
        if failures == 4:  # as many as there are tries
            add(asked, "1", 1)
            assert "/1 is complete, although the storage reported an error after its commit: " in caplog.text
        else:
            with raises_recorded(WriteError):
                add(asked, "1", 1)
    assert verify_checkpoint(asked / "1") == []


def test_a_run_does_not_say_that_nothing_was_written_after_the_commit(
    asked: RemotePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reset(self: Any, path: str, **more: Any) -> Any:
        if path.endswith("step=3/manifest.json") and any("step=3/manifest" in name for name in self.store):
            raise ConnectionResetError("reset")
        return info(self, path, **more)

    info = Asked.info
    with monkeypatch.context() as patch:
        patch.setattr(Asked, "info", reset)
        fit([steps(dirpath=str(asked), on_write_error="warn")], 8, max_steps=4)
    assert "Whether it is complete nevertheless could not be verified" in caplog.text
    assert "The last checkpoint that was written: step=2" in caplog.text
    assert CheckpointDirectory(asked).resolve("last") == asked / "step=4"


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_that_ends_with_an_uncertain_write_does_not_end_well(
    async_save: bool, asked: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset(self: Any, path: str, **more: Any) -> Any:
        if path.endswith("step=4/manifest.json") and any("step=4/manifest" in name for name in self.store):
            raise ConnectionResetError("reset")
        return info(self, path, **more)

    info = Asked.info
    with monkeypatch.context() as patch:
        patch.setattr(Asked, "info", reset)
        checkpoint = steps(dirpath=str(asked), async_save=async_save, on_write_error="warn")
        with raises_recorded(WriteError):
            fit([checkpoint, steps(dirpath=tmp_path)], 8, max_steps=4)
    assert verify_checkpoint(asked / "step=4") == []
    assert there(str(tmp_path))[-1] == "step=4"
