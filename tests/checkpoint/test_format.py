from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.messages import raises_recorded
from tests.tiers import Inputs
from trainer.checkpoint.deserialization import TensorInfo
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import find_damage, read_manifest, read_metadata, verify_checkpoint
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import CheckpointError
from trainer.testing import each_damage
from trainer.testing.damage import largest_file

Same = Callable[[Any, Any], None]
FILES = ("model.safetensors", "optimizers.safetensors", "checkpoint.json", "manifest.json")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_random_states_come_back_exactly(
    inputs: Inputs, tmp_path: Path, random_state: Callable[[int], dict[str, Any]], assert_same: Same
) -> None:
    for rng in inputs:
        state = random_state(rng.getrandbits(32))
        write_checkpoint(tmp_path / "c", state, overwrite=True)
        assert_same(state, read_checkpoint(str(tmp_path / "c")))
        assert verify_checkpoint(tmp_path / "c") == [], rng


def damaged(rng: random.Random, good: bytes) -> bytes:
    """Return the content of a file with one to three damages drawn at random."""
    bad = bytearray(good)
    for _ in range(rng.randint(1, 3)):
        begin, length = rng.randrange(len(bad) + 1), rng.choice([1, 8, 64, 512])
        part = bad[begin : begin + length]
        bad[begin : begin + length] = rng.choice(
            [b"", bytes(len(part)), rng.randbytes(len(part)), part + rng.randbytes(length), part[::-1], part + part]
        )
    return bytes(bad)


def test_damage_drawn_at_random_is_noticed(inputs: Inputs, checkpoint: Path) -> None:
    for rng in inputs:
        file = checkpoint / rng.choice(FILES)
        good = file.read_bytes()
        bad = damaged(rng, good)
        file.write_bytes(bad)
        if bad != good:
            with pytest.raises(CheckpointError):
                print(rng, read_checkpoint(checkpoint))
            assert verify_checkpoint(checkpoint), rng
        file.write_bytes(good)
    assert verify_checkpoint(checkpoint) == []


def test_a_module_and_its_optimizer_come_back(tmp_path: Path, assert_same: Same) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    write_checkpoint(tmp_path / "c", {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]})
    back = read_checkpoint(tmp_path / "c")
    assert_same(dict(model.state_dict()), back["model"])
    assert_same(optimizer.state_dict(), back["optimizers"][0])
    in_file = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert_same({name: in_file[name] for name in model.state_dict()}, dict(model.state_dict()))


def test_schedulers_resume_across_a_milestone(tmp_path: Path) -> None:
    """MultiStepLR keeps a Counter, and SequentialLR uses methods that a dict does not have."""

    def build() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, steps], [3])

    def rates(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, n: int) -> list[float]:
        result = []
        for _ in range(n):
            optimizer.step()
            scheduler.step()
            result.append(optimizer.param_groups[0]["lr"])
        return result

    uninterrupted = rates(*build(), 8)
    optimizer, scheduler = build()
    first = rates(optimizer, scheduler, 1)
    write_checkpoint(tmp_path / "c", {"o": optimizer.state_dict(), "s": scheduler.state_dict()})
    optimizer, scheduler = build()
    back = read_checkpoint(tmp_path / "c")
    optimizer.load_state_dict(back["o"])
    scheduler.load_state_dict(back["s"])
    assert first + rates(optimizer, scheduler, 7) == uninterrupted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device_come_back_on_the_cpu(tmp_path: Path, assert_same: Same) -> None:
    tensor = torch.arange(12.0, device="cuda").reshape(3, 4).t()
    write_checkpoint(tmp_path / "c", {"model": {"w": tensor, "tied": tensor}})
    back = read_checkpoint(tmp_path / "c")["model"]
    assert_same(back, {"w": tensor.cpu(), "tied": tensor.cpu()})
    assert back["w"] is back["tied"]


def test_only_the_wanted_files_are_read(checkpoint: Path) -> None:
    (checkpoint / "optimizers.safetensors").unlink()
    (checkpoint / "rest.txt").write_text("")
    assert list(read_checkpoint(checkpoint, keys=["progress", "model"])) == ["model", "progress"]
    assert verify_checkpoint(checkpoint) == [
        f"{checkpoint}/optimizers.safetensors cannot be read: No such file or directory",
        f"{checkpoint}/rest.txt is not in the manifest",
    ]
    assert find_damage(checkpoint) == [f"{checkpoint}/optimizers.safetensors cannot be read: No such file or directory"]
    assert read_checkpoint(checkpoint, keys=["other"]) == {}


def test_metadata_describes_tensors_without_opening_their_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    metadata = read_metadata(checkpoint)
    assert metadata["model"]["a.bias"] == TensorInfo("a.bias", "bfloat16", (20,))
    assert metadata["optimizers"][0]["state"][0]["step"] == TensorInfo("0.state.0.step", "float32", ())
    assert metadata["progress"] == {"step": 3}
    assert read_manifest(checkpoint).info == {"step": 3, "metrics": {"loss": 0.5}}


def test_info_takes_any_data_but_tensors(tmp_path: Path, assert_same: Same) -> None:
    info = {"step": 1, "metrics": {"loss": float("nan")}, "odd": {1: (2,)}}
    write_checkpoint(tmp_path / "c", {}, info=info)
    assert_same(read_manifest(tmp_path / "c").info, info)
    with raises_recorded(CheckpointError):
        write_checkpoint(tmp_path / "d", {}, info={"metrics": {"loss": torch.tensor(1.0)}})


# -- refusing to write -------------------------------------------------------------------------------------------------


def test_refused_data_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with raises_recorded(CheckpointError):
        write_checkpoint(tmp_path / "c", {"callbacks": {"Mine": {"path": tmp_path}}, "data": {"f": len}})
    assert list(tmp_path.iterdir()) == []


def test_only_checkpoints_are_overwritten_and_only_when_asked(checkpoint: Path) -> None:
    with raises_recorded(CheckpointError):
        write_checkpoint(checkpoint, {"new": 1})
    write_checkpoint(checkpoint, {"new": 1}, overwrite=True)
    assert read_checkpoint(checkpoint) == {"new": 1}
    folder, file, link = (checkpoint.parent / name for name in ("folder", "file", "link"))
    folder.mkdir()
    file.write_text("mine")
    link.symlink_to(checkpoint)
    for path in (folder, file, link):
        with raises_recorded(CheckpointError):
            write_checkpoint(path, {}, overwrite=True)
    with raises_recorded(CheckpointError):
        write_checkpoint(checkpoint.parent / ".hidden", {})


# -- damage -----------------------------------------------------------------------------------------------------------


def assert_noticed(checkpoint: Path, name: str) -> None:
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint)
    problems = verify_checkpoint(checkpoint)
    assert problems
    assert all(name in problem for problem in problems)


@pytest.mark.parametrize("name", FILES)
def test_every_changed_byte_is_noticed(name: str, checkpoint: Path) -> None:
    file = checkpoint / name
    good = file.read_bytes()
    rng = random.Random(name)
    for position in {0, 1, 7, 8, 9, len(good) // 2, len(good) - 1, *rng.sample(range(len(good)), 10)}:
        bad = bytearray(good)
        bad[position] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        with pytest.raises(CheckpointError):
            read_checkpoint(checkpoint)
        assert verify_checkpoint(checkpoint), position
    file.write_bytes(good)
    assert verify_checkpoint(checkpoint) == []


def test_a_checkpoint_of_format_1_is_read_and_verified_with_its_sha256(tmp_path: Path, assert_same: Same) -> None:
    """The files in format_1 were written by the last version of this package that wrote this format."""
    old = tmp_path / "old"
    shutil.copytree(Path(__file__).with_name("format_1"), old)
    assert {entry.algorithm for entry in read_manifest(old).files.values()} == {"sha256"}
    moments = {"exp_avg": torch.full((3, 4), 2.0), "step": torch.tensor(3.0)}
    expected = {
        "model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3, dtype=torch.bfloat16)},
        "optimizers": [{"state": {0: moments}}],
        "progress": {"step": 3},
    }
    assert_same(expected, read_checkpoint(old))
    for damage in each_damage(old):
        assert verify_checkpoint(old), damage
        with pytest.raises(CheckpointError):
            read_checkpoint(old)
    assert verify_checkpoint(old) == []
    write_checkpoint(old, read_checkpoint(old), overwrite=True)
    assert {entry.algorithm for entry in read_manifest(old).files.values()} == {"xxh3_128"}


def test_large_files_that_are_written_at_once_are_complete(tmp_path: Path, assert_same: Same) -> None:
    """An error of one of them leaves nothing, as an error of the only one does."""
    state = {key: {"w": torch.arange(2_500_000.0) + number} for number, key in enumerate("abc")}
    write_checkpoint(tmp_path / "c", state)
    assert_same(state, read_checkpoint(tmp_path / "c"))
    assert verify_checkpoint(tmp_path / "c") == []
    with largest_file(9_000_000), raises_recorded(CheckpointError):
        write_checkpoint(tmp_path / "d", state)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_no_part_of_the_manifest_is_unprotected(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    good = file.read_bytes()
    for position in range(0, len(good), 2):
        bad = bytearray(good)
        bad[position] ^= 1 << (position // 2 % 8)
        file.write_bytes(bad)
        with pytest.raises(CheckpointError):
            read_manifest(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_truncated_longer_and_missing_files_are_noticed(name: str, checkpoint: Path) -> None:
    file = checkpoint / name
    good = file.read_bytes()
    for bad in (good[:-1], good[: len(good) // 2], b"", good + b"\0"):
        file.write_bytes(bad)
        assert_noticed(checkpoint, name)
    file.unlink()
    assert_noticed(checkpoint, name)


def test_without_verify_only_sizes_and_structure_are_checked(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert read_checkpoint(checkpoint, verify=False)["progress"] == {"step": 3}
    assert find_damage(checkpoint, contents=False) == []
    file.write_bytes(good[:-1])
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint, verify=False)


# -- hostile ----------------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_under_one_of_our_names_is_not_executed(
    name: str, checkpoint: Path, reseal: Callable[..., None], tmp_path: Path
) -> None:
    marker = tmp_path / "executed"
    data = pickle.dumps(Payload(marker))
    pickle.loads(data)
    marker.unlink()  # the payload works here, and must not when it is loaded
    (checkpoint / name).write_bytes(data)
    if name != "manifest.json":
        reseal(checkpoint)
        assert verify_checkpoint(checkpoint) == []
    with pytest.raises(CheckpointError):
        read_checkpoint(checkpoint)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"model": {"$tensor": "missing", "dtype": "float32", "shape": []}},
        {"model": {"$tensor": "a.bias", "dtype": "float16", "shape": [20]}},
        {"model": {}},
        {"progress": {"$tensor": "a.bias", "dtype": "bfloat16", "shape": [20]}},
        {"../secret": {"$tensor": "w", "dtype": "float32", "shape": [2]}},
        {"progress": {"$python": "os.system"}},
    ],
)
def test_forged_data_is_refused(content: Any, checkpoint: Path, reseal: Callable[..., None]) -> None:
    (checkpoint.parent / "secret.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    (checkpoint / "checkpoint.json").write_text(json.dumps(content))
    reseal(checkpoint)
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint)


def sharded(shape: list[int], *parts: list[int]) -> dict[str, Any]:
    return {"model": {"$tensor": "a.bias", "dtype": "float32", "shape": shape, "parts": [*parts]}}


@pytest.mark.parametrize(
    "content",
    [
        sharded([10**14], [0, 0, 10**14, 0, 1]),
        sharded([10**14], [0, 0, 10, 0, 1], [1, 10, 10**14 - 10, 0, 1]),
        sharded([2**40, 2**40, 0]),
        {"model": {"$tensor": "a.bias", "dtype": "float32", "shape": [2**62, 2**62, 0]}},
    ],
    ids=["one file", "two files", "empty, sharded", "empty"],
)
def test_no_memory_is_taken_for_tensors_that_are_not_there(
    content: Any, checkpoint: Path, reseal: Callable[..., None]
) -> None:
    """Memory for 10**14 elements is nowhere, so that asking for it would be a RuntimeError of torch."""
    for rank in range(2):
        (checkpoint / f"model.0000{rank}.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "checkpoint.json").write_text(json.dumps(content))
    names = ["checkpoint.json", "model.00000.safetensors", "model.00001.safetensors"]
    empty = {"bytes": 0, "xxh3_128": ""}
    reseal(checkpoint, lambda body: body.update(files=dict.fromkeys(names, empty)))
    reseal(checkpoint)
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "model.pt", "", ".", "..", "x.safetensors\n"]
)
def test_forged_file_names_are_refused(name: str, checkpoint: Path, reseal: Callable[..., None]) -> None:
    reseal(checkpoint, lambda body: body["files"].update({name: {"bytes": 1, "xxh3_128": ""}}))
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        {"info": []},
        {"info": {"$tensor": "w", "dtype": "float32", "shape": []}},
        {"files": []},
        {"files": {}},
        {"files": {"checkpoint.json": 3}},
        {"files": {"checkpoint.json": {"bytes": "3", "xxh3_128": ""}}},
        {"files": {"checkpoint.json": {"bytes": -1, "xxh3_128": ""}}},
        {"files": {"checkpoint.json": {"bytes": True, "xxh3_128": ""}}},
        {"files": {"checkpoint.json": {"bytes": 3, "xxh3_128": "", "x": 1}}},
        {"version": "1"},
        {"version": None},
        {"format": "other"},
        {"more": 1},
    ],
    ids=str,
)
def test_forged_manifests_are_refused(change: Any, checkpoint: Path, reseal: Callable[..., None]) -> None:
    reseal(checkpoint, lambda body: body.update(change))
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint)


def test_files_that_are_no_files_are_refused(checkpoint: Path, reseal: Callable[..., None], tmp_path: Path) -> None:
    file = checkpoint / "model.safetensors"
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert_noticed(checkpoint, "model.safetensors is a symbolic link")
    file.unlink()
    os.mkfifo(file)  # opening one would wait for ever
    reseal(checkpoint)
    assert_noticed(checkpoint, "model.safetensors is a symbolic link or not a regular file")


def test_a_huge_header_is_refused_without_being_read(checkpoint: Path, reseal: Callable[..., None]) -> None:
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}" * 100)
    reseal(checkpoint)
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint)


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_wrong_path_says_what_there_is(checkpoint: Path, tmp_path: Path) -> None:
    with raises_recorded(CheckpointError):
        read_checkpoint(tmp_path / "step=4")
    with raises_recorded(CheckpointError):
        read_checkpoint(tmp_path / "no" / "such")
    with raises_recorded(CheckpointError):
        read_checkpoint(tmp_path)
    (tmp_path / "model.ckpt").write_bytes(b"PK")
    with raises_recorded(CheckpointError):
        read_checkpoint(tmp_path / "model.ckpt")
    (checkpoint / "manifest.json").unlink()
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint)


def test_a_newer_format_says_what_to_do(checkpoint: Path, reseal: Callable[..., None]) -> None:
    reseal(checkpoint, lambda body: body.update(version=3))
    with raises_recorded(CheckpointError):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_a_checkpoint_in_the_folder_of_another_is_not_deleted_with_it(store: str, tmp_path: Path) -> None:
    folder = f"memory://{tmp_path.name}/run" if store == "memory" else str(tmp_path / "run")
    write_checkpoint(folder, {"a": 1})
    write_checkpoint(f"{folder}/best", {"a": 2})
    with raises_recorded(CheckpointError):
        write_checkpoint(folder, {"a": 3}, overwrite=True)
    assert (read_checkpoint(folder), read_checkpoint(f"{folder}/best")) == ({"a": 1}, {"a": 2})
