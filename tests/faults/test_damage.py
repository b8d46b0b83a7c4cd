"""`fit`, `validate` and `load_from_checkpoint` refuse damaged and hostile checkpoints."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks._chaos_training import Net, main
from benchmarks.chaos import problems
from tests.checkpoint.conftest import reseal
from trainer import Trainer
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.generator_states import check_torch_states
from trainer.checkpoint.manifest import verify_checkpoint
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import CheckpointError, TrainerError
from trainer.loop.progress import Progress
from trainer.testing import compare_runs, each_damage

FILES = ["manifest.json", "checkpoint.json", "model.safetensors", "optimizers.safetensors", "rng.safetensors"]


def train(folder: Path, epochs: int) -> Path:
    main([str(folder), "--epochs", str(epochs), "--width", "4"])
    return folder / "version_0"


@pytest.fixture(scope="module")
def runs(memory_folder: Path) -> dict[str, Path]:
    """Return a run that was stopped after two epochs, and an uninterrupted one of three."""
    return {"stopped": train(memory_folder / "stopped", 2), "uninterrupted": train(memory_folder / "uninterrupted", 3)}


@pytest.fixture
def stopped(runs: dict[str, Path], memory_folder: Path) -> Path:
    """Return a copy of the stopped run."""
    folder = memory_folder / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(runs["stopped"].parent, folder)
    return folder / "version_0"


def last(run: Path) -> Path:
    path = CheckpointDirectory(run / "checkpoints").pointer("last")
    assert isinstance(path, Path)
    return path


# -- damage ------------------------------------------------------------------------------------------------------------


def test_every_damage_of_the_last_checkpoint_is_named_and_the_one_before_is_taken(
    runs: dict[str, Path], memory_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file is damaged in each way; the run ends with the bits of the uninterrupted one."""
    original = runs["stopped"]
    seen = set()
    target = last(original)
    for what in each_damage(target):
        seen.add(what.partition(":")[0])
        copy = memory_folder / "damaged"
        shutil.copytree(original.parent, copy)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="trainer"):
            main([str(copy), "--epochs", "3", "--width", "4"])
        messages = [record.getMessage() for record in caplog.records]
        assert any(target.name in message for message in messages), (what, messages)
        assert compare_runs(runs["uninterrupted"], copy / "version_0") == [], what
        assert [path.name for path in copy.iterdir()] == ["version_0"], what
        shutil.rmtree(copy)
    assert seen == {path.name for path in target.iterdir()} >= set(FILES)
    assert verify_checkpoint(target) == []


@pytest.mark.parametrize("pointer", ["last.json", "best.json"])
def test_a_damaged_pointer_is_passed_over(pointer: str, runs: dict[str, Path], memory_folder: Path) -> None:
    for content in (
        *(b"", b"{", b"[]", b'{"checkpoint": 3}', b'{"checkpoint": "../../uninterrupted"}', b"\xff\xfe", None),
    ):
        copy = memory_folder / "pointer"
        shutil.copytree(runs["stopped"].parent, copy)
        file = copy / "version_0" / "checkpoints" / pointer
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        main([str(copy), "--epochs", "3", "--width", "4"])
        assert problems(copy, runs["uninterrupted"]) == [], content
        shutil.rmtree(copy)


@pytest.mark.parametrize("how", ["flipped", "without manifest"])
def test_when_none_is_left_nothing_is_trained(how: str, stopped: Path) -> None:
    """Training starts neither from scratch, nor from an older run."""
    shutil.copytree(stopped, stopped.with_name("version_1"))
    for path in (stopped.with_name("version_1") / "checkpoints").glob("*/"):
        if how == "flipped":
            (path / "model.safetensors").write_bytes(b"\0" * (path / "model.safetensors").stat().st_size)
        else:
            (path / "manifest.json").unlink()
    before = sorted(stopped.parent.rglob("*"))
    with pytest.raises(CheckpointError, match="no intact checkpoint") as caught:
        train(stopped.parent, 3)
    assert ("model.safetensors" if how == "flipped" else "last.json") in str(caught.value)
    assert "To start again, leave ckpt_path='last' out" in str(caught.value)
    assert sorted(stopped.parent.rglob("*")) == before


# -- hostile content ---------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def refused(path: Path, names: str | None = None) -> None:
    """Check that all ways of loading refuse this checkpoint with a message."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "max_steps": 99,
    }
    batches = [torch.ones(4, 8)]
    calls: list[Callable[[], Any]] = [
        lambda: Net.load_from_checkpoint(path),
        lambda: Trainer(accelerator="cpu", **quiet).fit(Net(4), batches, ckpt_path=path),
        lambda: Trainer(accelerator="cpu", **quiet).validate(Net(4), batches, ckpt_path=path),
    ]
    for call in calls:
        with pytest.raises(TrainerError, match=names):
            call()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
def test_pickles_are_not_executed(name: str, everywhere: bool, stopped: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    data = pickle.dumps(Payload(marker))
    pickle.loads(data)
    marker.unlink()  # the payload works here, and must not when it is loaded
    path = last(stopped)
    (path / name).write_bytes(data)
    if everywhere:
        for other in ("data.pkl", "model.pt", "__init__.py", ".metadata", "pytorch_model.bin"):
            (path / other).write_bytes(data)
    if name != "manifest.json":
        reseal(path)
    if name in ("model.safetensors", "checkpoint.json", "manifest.json"):
        refused(path)
    with pytest.raises(CheckpointError):
        Trainer(accelerator="cpu", max_steps=99, logger=False).fit(Net(4), [torch.ones(4, 8)], ckpt_path=path)
    assert not marker.exists()


BOMBS: dict[str, Callable[[Any], Any]] = {
    "a million lists": lambda data: "[" * 1_000_000 + "]" * 1_000_000,
    "a million objects": lambda data: '{"a":' * 1_000_000 + "1" + "}" * 1_000_000,
    "a number with a million digits": lambda data: '{"model": ' + "9" * 1_000_000 + "}",
    "half of a document": lambda data: json.dumps(data)[:-40],
    "not an object": lambda data: "[]",
    "nothing": lambda data: "{}",
    "a shape without bounds": lambda data: json.dumps(data).replace(
        '"shape": [4, 8]', '"shape": [4, 8, 1000000000000]'
    ),
    "another tensor": lambda data: json.dumps(data).replace('"$tensor": "net.0.weight"', '"$tensor": "../../secret"'),
    "an object of Python": lambda data: json.dumps({**data, "model": {"$python": "os.system"}}),
    "no weights": lambda data: json.dumps({**data, "model": None}),
    "weights of another model": lambda data: json.dumps({**data, "model": {}}),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_hostile_json_is_refused(bomb: str, stopped: Path) -> None:
    path = last(stopped)
    file = path / "checkpoint.json"
    file.write_text(BOMBS[bomb](json.loads(file.read_text())))
    reseal(path)
    refused(path)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"seed": "1; import os"}, "the checkpoint['seed'] is of type str"),
        ({"world_size": 10**9}, "'rng' has 1 entries for 1000000000 processes"),
        ({"progress": {"step": 3}}, "the checkpoint['progress'] has no 'epoch'"),
        ({"progress": {**Progress().state_dict(), "step": -5}}, "the checkpoint['progress']['step'] is -5"),
        ({"callbacks": None, "run_dir": None}, "the checkpoint['callbacks'] is None"),
    ],
)
def test_what_no_training_writes_is_refused(change: dict[str, Any], names: str, stopped: Path) -> None:
    path = last(stopped)
    data = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**data, **change}))
    reseal(path)
    with pytest.raises(CheckpointError, match=re.escape(names)):
        train(stopped.parent, 3)


def torch_state(left: int, position: int) -> torch.Tensor:
    state = torch.Generator().manual_seed(1).get_state()
    state[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
    state[16:24] = torch.tensor([position], dtype=torch.int64).view(torch.uint8)
    return state


def numpy_state(**changes: Any) -> dict[str, Any]:
    state: Any = np.random.RandomState(1).get_state(legacy=False)
    key = torch.from_numpy(state["state"]["key"].astype(np.int64))
    return {**state, "state": {"key": key, "pos": 624, **changes}}


def philox_state(position: int) -> dict[str, Any]:
    return {**np.random.Philox(1).state, "buffer_pos": position, "gauss": 0.0, "has_gauss": 0}


STATES: dict[str, dict[str, Any]] = {
    "numpy far": {"numpy": numpy_state(pos=100_000)},
    "numpy before": {"numpy": numpy_state(pos=-1)},
    "numpy one after": {"numpy": numpy_state(pos=625)},
    "numpy no number": {"numpy": numpy_state(pos=3.0)},
    "numpy few words": {"numpy": numpy_state(key=torch.zeros(10, dtype=torch.int64))},
    "numpy other": {"numpy": {"bit_generator": "os.system", "state": {}}},
    "numpy Philox": {"numpy": philox_state(-1000)},
    "torch beyond": {"torch": torch_state(left=624, position=600)},
    "torch none left": {"torch": torch_state(left=0, position=0)},
    "torch short": {"torch": torch.zeros(16, dtype=torch.uint8)},
    "torch words": {"torch": torch.zeros(5056)},
    "python words": {"python": {"version": 3, "words": torch.zeros(3, dtype=torch.int64), "gauss": None}},
    "python index": {"python": {"version": 3, "words": torch.full((625,), 10**6), "gauss": None}},
    "python text": {"python": {"version": 3, "words": "625", "gauss": None}},
    "missing": {"numpy": None},
}


@pytest.mark.parametrize("forged", STATES)
def test_states_of_generators_that_are_none_are_refused(forged: str, stopped: Path) -> None:
    path = last(stopped)
    state = read_checkpoint(path)
    state["rng"][0] |= STATES[forged]
    write_checkpoint(path, state, info={"step": 1}, overwrite=True)
    with pytest.raises(CheckpointError, match=f"'rng' of rank 0: '{forged.split()[0].replace('missing', 'numpy')}"):
        train(stopped.parent, 3)


def test_states_of_generators_in_a_loaders_state_are_checked() -> None:
    check_torch_states({"sampler": [torch_state(left=1, position=0)], "other": torch.zeros(3)}, "'loader'")
    with pytest.raises(CheckpointError, match="'loader': 'torch' has the position 2 with 624 words left"):
        check_torch_states({"sampler": [{"generator": torch_state(left=624, position=2)}]}, "'loader'")


def exchange(state: dict[str, Any], key: str, value: torch.Tensor) -> None:
    next(iter(state["optimizers"][0]["state"].values()))[key] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: exchange(state, "exp_avg", torch.zeros(1)), r"'exp_avg' of .* has the shape \[1\]"),
        (lambda state: exchange(state, "step", torch.zeros(0)), r"'step' of .* has the shape \[0\]"),
        (lambda state: state["optimizers"][0].pop("state"), r"the checkpoint\['optimizers'\]\[0\] has no 'state'"),
        (lambda state: state["optimizers"][0].update(param_groups=3), r"\[0\]\['param_groups'\] is 3"),
        (lambda state: state.update(measured={"loss": 3}), r"the checkpoint\['measured'\]\['loss'\] is 3"),
        (lambda state: state.update(metrics=[{"train": 3}]), r"the checkpoint\['metrics'\]\[0\] has no 'hooks'"),
        (
            lambda state: state.update(callbacks={key: {} for key in state["callbacks"]}),
            "ModelCheckpoint has no 'kept'",
        ),
        (
            lambda state: state["progress"].update(batch=2**70),
            r"the checkpoint\['progress'\]\['batch'\] is of type int",
        ),
    ],
    ids=["moment", "step", "no state", "no groups", "measured", "metrics", "callback", "counter"],
)
def test_entries_that_do_not_fit_are_named(change: Callable[[Any], Any], message: str, stopped: Path) -> None:
    path = last(stopped)
    state = read_checkpoint(path)
    change(state)
    write_checkpoint(path, state, info={"step": 1}, overwrite=True)
    with pytest.raises(CheckpointError, match=message):
        train(stopped.parent, 3)


def test_a_header_that_claims_more_than_there_is_is_refused(stopped: Path) -> None:
    path = last(stopped)
    for claimed in (2**63, 10**8, 2**20):
        (path / "model.safetensors").write_bytes(claimed.to_bytes(8, "little") + b"{}")
        reseal(path)
        refused(path, "model.safetensors")


@pytest.mark.parametrize("named", ["victim", "version_7", "victim/../victim/version_7"])
def test_a_checkpoint_does_not_say_where_files_are_written(named: str, stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    path = tmp_path / "downloaded"
    shutil.copytree(last(stopped), path)
    data = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**data, "run_dir": str(tmp_path / named)}))
    reseal(path)
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path / "runs", enable_progress_bar=False)
    trainer.validate(Net(4), [torch.ones(4, 8)], ckpt_path=path)
    assert trainer.run_dir == tmp_path / "runs" / "version_0"
    assert list((tmp_path / "victim").iterdir()) == []


def test_names_of_kept_checkpoints_cannot_lead_outside(stopped: Path, tmp_path: Path) -> None:
    """A checkpoint lists those that it may delete, which must be in its own folder."""
    victim = tmp_path / "victim"
    shutil.copytree(last(stopped), victim)
    path = last(stopped)
    data = json.loads((path / "checkpoint.json").read_text())
    for name in (str(victim), f"../../../../../../../..{victim}"):
        [key] = [key for key in data["callbacks"] if key.startswith("ModelCheckpoint")]
        data["callbacks"][key]["kept"] = {name: 9.0, path.name: 1.0}
        (path / "checkpoint.json").write_text(json.dumps(data))
        reseal(path)
        with suppress(TrainerError):
            train(stopped.parent, 3)
        assert verify_checkpoint(victim) == []
        shutil.rmtree(stopped / "checkpoints")
        shutil.copytree(victim.parent / "victim", path)
        CheckpointDirectory(stopped / "checkpoints").set_pointer("last", path.name)
