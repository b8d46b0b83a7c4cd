"""A callback of a resumed run goes on with its own state, wherever in the list it is, and deletes what it wrote."""

from __future__ import annotations

import shutil
from enum import Enum
from itertools import islice
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError
from trainer.callbacks import EarlyStopping, ModelCheckpoint
from trainer.checkpoint import kept
from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.manifest import checkpoints_in, read_manifest
from trainer.checkpoint.storage import as_storage_path

STEPS = 2


class Counts(Callback):
    """A callback of the user, several of which may be in a run."""

    def __init__(self, every: int = 1, name: str = "") -> None:
        self.every, self.count = every, 0

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.count += self.every

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def fit(folder: Path, epochs: int, callbacks: list[Callback], batches: int = STEPS) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": folder}
    quiet(max_epochs=epochs, callbacks=callbacks, **options).fit(Toy(), loader(batches), loader(1), ckpt_path="last")


# -- states ------------------------------------------------------------------------------------------------------------


def counted(folder: Path, before: list[int], now: list[int]) -> list[int]:
    """Return how far the callbacks of a resumed run of one more step have counted, of a run of four steps before."""
    fit(folder, 2, [Counts(every) for every in before])
    later = [Counts(every) for every in now]
    fit(folder, 3, [*later])
    return [one.count // one.every - STEPS for one in later]


@pytest.mark.parametrize(
    ("before", "now", "steps"),
    [
        ([1, 100], [100, 1], [4, 4]),
        ([1, 100], [100], [4]),
        ([100], [1, 100], [0, 4]),
        ([1, 100], [1, 100, 7], [4, 4, 0]),
        ([5], [7], [20 // 7]),  # its argument was changed
        ([5, 5], [5, 5], [4, 4]),
    ],
    ids=str,
)
def test_states_follow_the_arguments(before: list[int], now: list[int], steps: list[int], tmp_path: Path) -> None:
    assert counted(tmp_path, before, now) == steps


def test_what_is_ambiguous_begins_anew_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert counted(tmp_path / "one", [1, 100], [7, 9]) == [0, 0]
    assert "has the state of Counts, Counts-2, which this run does not have, or has several times" in caplog.text
    assert counted(tmp_path / "two", [1, 100], [100, 7]) == [4, 0]
    assert "has the state of Counts, which this run does not have, or has several times" in caplog.text


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    def make(step: int) -> type[Counts]:
        class Local(Counts):
            def on_train_step_end(self, trainer: Any, module: Any) -> None:
                self.count += step

        return Local

    one, other = make(1), make(100)
    fit(tmp_path, 1, [one(), one(2)])
    with raises_recorded(ConfigError):
        fit(tmp_path, 1, [one(), other()])


def test_two_early_stoppings_of_one_value(tmp_path: Path) -> None:
    def both(folder: Path, epochs: int, turned: bool) -> list[tuple[int, int]]:
        found = [EarlyStopping("val_loss", patience=50), EarlyStopping("val_loss", patience=40, min_delta=100.0)]
        fit(folder, epochs, [*found[:: -1 if turned else 1]])
        return [(one.patience, one.wait_count) for one in found]

    both(tmp_path / "a", 3, False)
    assert both(tmp_path / "a", 5, True) == both(tmp_path / "b", 5, False) == [(50, 0), (40, 4)]


# -- checkpoints that are deleted --------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "keep": {"filename": "keep-{epoch}", "save_top_k": -1},
    "crash": {"filename": "crash-{step}", "every_n_train_steps": 1},
    "time": {"filename": "time-{step}", "train_time_interval": 3600},
    "best1": {"filename": "best-{epoch}", "monitor": "val_loss", "mode": "min"},
    "best4": {"filename": "best-{epoch}", "monitor": "val_loss", "mode": "min", "save_top_k": 4},
    "other": {"filename": "other-{epoch}", "monitor": "val_loss", "mode": "min"},
    "plain": {},
    "folder": {"inside": "another"},
}


def made(name: str, root: str, asynchronous: bool) -> ModelCheckpoint:
    options = dict(KINDS[name])
    return ModelCheckpoint(f"{root}/{options.pop('inside', 'c')}", async_save=asynchronous, **options)


def there(root: str) -> set[str]:
    return {
        f"{part}/{one.name}" for part in ("c", "another") for one in checkpoints_in(as_storage_path(f"{root}/{part}"))
    }


def test_a_run_from_an_older_copy_leaves_what_was_written_since(
    tmp_path: Path,
) -> None:
    def run(name: str, epochs: int, path: Any) -> ModelCheckpoint:
        writes = ModelCheckpoint(tmp_path / "c", filename="model")
        options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path / name}
        quiet(max_epochs=epochs, callbacks=[writes], **options).fit(Toy(), loader(STEPS), ckpt_path=path)
        return writes

    run("one", 1, None)
    shutil.copytree(tmp_path / "c" / "model", tmp_path / "copy")
    run("one", 3, "last")
    newer = read_manifest(tmp_path / "c" / "model").info
    assert newer["step"] == 3 * STEPS  # its own is replaced
    fork = run("two", 2, tmp_path / "copy")
    assert read_manifest(tmp_path / "c" / "model").info == newer
    assert fork.last_model_path == str(tmp_path / "c" / "model-v1")


class Kept(Callback):
    """Keeps the last number of the step, in a tensor, and the object that it was made with."""

    def __init__(self, of: Any = None) -> None:
        self.of, self.seen = of, torch.zeros(2)

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.seen += 1 if self.of is None or self.of == OBJECTS[type(self.of)][0] else 10

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"].clone()


class Color(Enum):
    RED = 1
    BLUE = 2


OBJECTS: dict[type, tuple[Any, Any]] = {
    SimpleNamespace: (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    Color: (Color.RED, Color.BLUE),
    torch.dtype: (torch.float16, torch.float64),
    FunctionType: (lambda value: value, lambda value: -value),
}


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_objects_among_the_arguments_tell_callbacks_apart(kind: type, tmp_path: Path) -> None:
    one, other = OBJECTS[kind]
    run = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    quiet(callbacks=[Kept(one), Kept(other)], max_epochs=1, **run).fit(Toy(), loader(2))
    swapped = [Kept(other), Kept(one)]
    quiet(callbacks=swapped, max_epochs=1, **run).fit(Toy(), loader(2), ckpt_path="last")
    assert [kept.seen.tolist() for kept in swapped] == [[20, 20], [2, 2]]


def test_the_rest_of_a_failed_write_is_not_what_another_callback_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, real = [0], kept.write_checkpoint

    def fails_once(*args: Any, **options: Any) -> None:
        written[0] += 1
        if written[0] == 3:
            raise WriteError("for a moment")
        real(*args, **options)

    monkeypatch.setattr(kept, "write_checkpoint", fails_once)
    every_epoch = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)
    every_step = ModelCheckpoint(tmp_path, every_n_train_steps=1, on_write_error="warn")
    quiet(callbacks=[every_epoch, every_step], max_epochs=2, enable_checkpointing=True).fit(Toy(), loader(3))
    assert {*every_epoch.kept} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("store", ["disk", "memory", "async"])
def test_no_callback_deletes_what_it_did_not_write(store: str, inputs: Any, tmp_path: Path) -> None:
    """Drawn lists of ModelCheckpoints before and after a resume; the owners of files are noted by the test."""
    for rng in islice(inputs, 0, None, 10):
        seed = rng.seed_given
        root = f"memory://{tmp_path.name}-{seed}" if store == "memory" else str(tmp_path / str(seed))
        before = rng.sample(list(KINDS), rng.randint(1, 3))
        after = rng.sample(list(KINDS), rng.randint(1, 3)) if rng.random() < 0.5 else rng.sample(before, len(before))
        if rng.random() < 0.5:
            after = [*after, *rng.sample([one for one in KINDS if one not in after], 1)]
        first = {name: made(name, root, store == "async") for name in before}
        fit(tmp_path / f"runs{seed}", 3, [*first.values()])
        owned = {name: {f"{KINDS[name].get('inside', 'c')}/{one}" for one in first[name].kept} for name in before}
        assert set().union(*owned.values()) == there(root), (seed, before)
        # It knows of what the others have written; "crash" has written before the end of the epoch.
        last = first[max(before, key=lambda name: (name != "crash", before.index(name)))].last_model_path
        second = {name: made(name, root, store == "async") for name in after}
        options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path / f"runs{seed}"}
        quiet(max_epochs=5, callbacks=[*second.values()], **options).fit(
            Toy(), loader(STEPS), loader(1), ckpt_path=last
        )
        may_go = set().union(*(owned[name] for name in after if name in owned))
        if len({"best1", "best4"} & {*before}) == len({"best1", "best4"} & {*after}) == 1:
            may_go |= set().union(*(owned.get(name, set()) for name in ("best1", "best4")))  # another save_top_k
        gone = set().union(*owned.values()) - there(root)
        assert gone <= may_go, (seed, before, after, gone - may_go)
        for name in after:  # and each goes on with its list
            assert not (gone & owned.get(name, set()) & {f"c/{one}" for one in second[name].kept}), (
                seed,
                before,
                after,
            )
            if name in owned and KINDS[name].get("save_top_k") == -1:
                assert {f"c/{one}" for one in second[name].kept} > owned[name], (seed, before, after)
