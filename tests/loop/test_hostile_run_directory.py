"""A file of somebody else in a run directory is neither written through nor waited for, and names no other run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.saving import fit, steps
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, Trainer
from trainer.callbacks import CSVLogger, JSONLLogger, PredictionWriter, TensorBoardLogger, TorchProfiler
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.manifest import checkpoints_in
from trainer.fault_tolerance import flight_recorder
from trainer.fault_tolerance.file_lock import NAME
from trainer.strategies.deepspeed.config import write_config

WRITTEN = (
    "config.yaml",
    "metrics.jsonl",
    "metrics.csv",
    "metrics.csv.part",
    "hparams.json",
    "hparams.json.part",
    "deepspeed.json",
)


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    signal.alarm(300)
    yield
    signal.alarm(0)


def train(root: Path, epochs: int = 1, **more: Any) -> Trainer:
    trainer = quiet(
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[steps()],
        logger=[CSVLogger(), JSONLLogger(), TensorBoardLogger()],
        default_root_dir=root,
    )
    trainer._session.config_text = "seed: 3\n"
    trainer.fit(Toy(), loader(6), **more)
    return trainer


def test_links_in_a_run_directory_are_replaced_and_never_followed(tmp_path: Path) -> None:
    run_dir = train(tmp_path / "runs").run_dir
    victims = {name: tmp_path / f"victim {name}" for name in WRITTEN}
    for name, victim in victims.items():
        victim.write_text("precious")
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).symlink_to(victim)
    assert train(tmp_path / "runs", 2, ckpt_path="last").global_step == 12
    write_config({"a": 1}, run_dir)
    assert {victim.read_text() for victim in victims.values()} == {"precious"}
    assert (run_dir / "config.yaml").read_text() == "seed: 3\n"
    assert not (run_dir / "metrics.csv").is_symlink()


def test_a_link_among_the_event_files_is_not_followed(tmp_path: Path) -> None:
    run_dir = train(tmp_path / "runs").run_dir
    victim = tmp_path / "victim"
    (event_file,) = run_dir.glob("events.*.training")
    victim.write_bytes(event_file.read_bytes() + b"precious")
    event_file.unlink()
    event_file.symlink_to(victim)
    train(tmp_path / "runs", 2, ckpt_path="last")
    assert victim.read_bytes().endswith(b"precious")


@pytest.mark.parametrize("kind", ["link", "dangling link", "second name", "pipe"])
def test_a_lock_that_is_no_plain_file_is_refused_with_a_message(kind: str, tmp_path: Path) -> None:
    run_dir = train(tmp_path / "runs").run_dir
    victim = tmp_path / "victim"
    if kind != "dangling link":
        victim.write_text("precious")
    if kind == "second name":
        os.link(victim, run_dir / NAME)
    elif kind == "pipe":
        os.mkfifo(run_dir / NAME)
    else:
        (run_dir / NAME).symlink_to(victim)
    with raises_recorded(ConfigError):
        train(tmp_path / "runs", ckpt_path="last")
    assert not victim.exists() or victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["metrics.csv", "checkpoints/last.json", "checkpoints/best.json"])
@pytest.mark.parametrize("kind", ["pipe", "endless device", "folder"])
def test_a_file_that_is_none_is_not_waited_for(name: str, kind: str, tmp_path: Path) -> None:
    run_dir = train(tmp_path / "runs").run_dir
    (run_dir / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run_dir / name)
    elif kind == "endless device":
        (run_dir / name).symlink_to("/dev/zero")
    else:
        (run_dir / name).mkdir()
    unwritable = kind == "folder" and name == "checkpoints/last.json"
    with raises_recorded(WriteError) if unwritable else nullcontext():
        train(tmp_path / "runs", 2, ckpt_path="last")
    assert CheckpointDirectory(run_dir / "checkpoints").resolve("last").name in ("step=6", "step=7", "step=12")


def test_the_flight_recorder_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C import _distributed_c10d

    entry = {"retired": False, "profiling_name": "gloo:barrier", "input_sizes": [], "collective_seq_id": 1}
    text = json.dumps({"entries": [{**entry, "process_group": ["0", "default"]}]}).encode()
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda: text)
    victim, name = tmp_path / "victim", "flight-recorder-rank0.json"
    victim.write_text("precious")
    (tmp_path / name).symlink_to(victim)
    assert "barrier" in flight_recorder.waiting_in(tmp_path, 0)
    assert victim.read_text() == "precious"
    assert (tmp_path / name).read_bytes() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "victim"]


def test_a_checkpoint_names_no_run_into_which_an_evaluation_writes(tmp_path: Path) -> None:
    other = train(tmp_path / "others").run_dir
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    checkpoint = tmp_path / "downloaded"
    shutil.copytree(other / "checkpoints" / "step=6", checkpoint)  # its run_dir is that of the other run
    trainer = quiet(logger=CSVLogger())
    trainer.validate(Toy(), loader(2), ckpt_path=checkpoint)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert trainer.run_dir.parent.resolve() == Path("runs").resolve()


# -- directories of runs -----------------------------------------------------------------------------------------------


def test_the_name_of_a_run_directory_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    run_dir = fit([steps()], default_root_dir=tmp_path / "a" / "runs").run_dir
    assert flushed[:3] == [str(tmp_path), str(tmp_path / "a"), str(run_dir.parent)]


def test_a_reader_looks_again_while_checkpoints_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that the reader has listed is deleted before it is read, as a newer one has come."""
    folder = tmp_path / "c"
    fit([steps(dirpath=folder, save_top_k=1)])
    (folder / "step=6").rename(folder / "step=7")
    left = [True]

    def outdated(path: Path) -> list[Any]:
        found: list[Any] = checkpoints_in(path)
        if left:
            left.clear()
            (folder / "step=7").rename(folder / "step=8")
        return found

    monkeypatch.setattr("trainer.checkpoint.directory.checkpoints_in", outdated)
    assert CheckpointDirectory(folder).resolve("last").name == "step=8"


def test_links_instead_of_folders_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    precious = elsewhere / "predictions-rank00000-of-00001.json"
    precious.write_text("precious")
    run_dir = train(tmp_path / "runs").run_dir
    for name in ("predictions", "profile"):
        (run_dir / name).symlink_to(elsewhere)
    with raises_recorded(ConfigError):
        quiet(default_root_dir=tmp_path / "runs", callbacks=[PredictionWriter()]).predict(
            Toy(), loader(2), ckpt_path="last"
        )
    profiled = quiet(default_root_dir=tmp_path / "runs", callbacks=[TorchProfiler(wait=0, warmup=0)], max_steps=8)
    with raises_recorded(ConfigError):
        profiled.fit(Toy(), loader(6), ckpt_path="last")
    assert [path.name for path in elsewhere.iterdir()] == [precious.name]
    assert precious.read_text() == "precious"
    quiet(callbacks=[PredictionWriter(run_dir / "predictions")]).predict(Toy(), loader(2))
    assert precious.read_text() != "precious"
