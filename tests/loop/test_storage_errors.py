"""Errors of the file system beside the checkpoints: training goes on without notes; what must be read is reported."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.saving import fit, steps, there
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import CheckpointError, ConfigError
from trainer.callbacks import CSVLogger, TorchProfiler
from trainer.checkpoint.disk import ReadError, WriteError
from trainer.fault_tolerance.file_lock import FolderLock
from trainer.strategies.deepspeed.config import write_config


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, int], None]:
    """Return a function that makes a function of `os` fail for paths with some text in them."""

    def arm(function: str, text: str, code: int) -> None:
        real = getattr(os, function)

        def failing(*args: Any, **options: Any) -> Any:
            if any(text in os.fspath(one) for one in args if isinstance(one, (str, Path))):
                raise OSError(code, os.strerror(code), str(args[-1]))
            return real(*args, **options)

        monkeypatch.setattr(os, function, failing)

    return arm


def test_what_is_published_stays_so_where_leftovers_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.stat

    def failing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and ".tmp-step=" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return look(path, *args, **options)

    monkeypatch.setattr(os, "stat", failing)
    fit([steps(dirpath=tmp_path)])
    assert there(tmp_path) == ["step=5", "step=6"]


def test_rows_that_are_lost_at_the_end_are_reported(
    refuse: Callable[[str, str, int], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuse("replace", "metrics.csv", errno.ENOSPC)
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[CSVLogger()], log_every_n_steps=1)
    trainer.fit(Toy(), loader(3))
    assert "metrics.csv could not be written until the end: the rows kept in memory are lost." in caplog.text


@pytest.mark.parametrize("name", ["hparams.json", "config.yaml"])
def test_training_goes_on_without_notes_that_cannot_be_written(
    name: str,
    refuse: Callable[[str, str, int], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse("replace", name, errno.ENOSPC)
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[CSVLogger()])
    trainer.record_config("seed: 3\n")
    trainer.fit(Toy(), loader(3))
    assert trainer.global_step == 3
    assert (trainer.run_dir / "metrics.csv").exists()
    path = trainer.run_dir / name
    assert f"cannot write {path} (No space left on device): training goes on without it." in caplog.text
    assert sorted(path.name for path in trainer.run_dir.iterdir() if path.name.startswith(".tmp")) == []


@pytest.mark.parametrize("name", ["hparams.json", "config.yaml"])
def test_notes_that_cannot_be_replaced_at_a_resume_stay_as_they_were(
    name: str, refuse: Callable[[str, str, int], None], tmp_path: Path
) -> None:
    def train(seed: int) -> Path:
        trainer = quiet(
            max_steps=3 * seed, default_root_dir=tmp_path, callbacks=[CSVLogger()], enable_checkpointing=True
        )
        trainer.record_config(f"seed: {seed}\n")
        trainer.fit(Toy(), loader(6), ckpt_path="last")
        return trainer.run_dir

    before = (train(1) / name).read_bytes()
    refuse("replace", name, errno.EIO)
    assert (train(2) / name).read_bytes() == before


def test_so_does_deepspeed(
    refuse: Callable[[str, str, int], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuse("replace", "deepspeed.json", errno.EDQUOT)
    write_config({"a": 1}, tmp_path)
    assert f"cannot write {tmp_path / 'deepspeed.json'} (Disk quota exceeded)" in caplog.text


def test_so_does_a_profile(
    refuse: Callable[[str, str, int], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuse("replace", "pt.trace.json", errno.ENOSPC)
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[TorchProfiler(wait=0, warmup=1, active=1)])
    trainer.fit(Toy(), loader(3))
    assert trainer.global_step == 3
    assert "pt.trace.json.gz (No space left on device): training continues without it." in caplog.text


def test_an_error_in_writing_is_not_hidden_by_one_in_tidying_up(
    refuse: Callable[[str, str, int], None], tmp_path: Path
) -> None:
    refuse("replace", "last.json", errno.EIO)
    refuse("unlink", ".tmp-last.json", errno.EROFS)
    with raises_recorded(WriteError):
        fit([steps(dirpath=tmp_path)])


def test_rows_that_cannot_be_read_are_not_overwritten(
    refuse: Callable[[str, str, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet(
        max_epochs=1, max_steps=3, default_root_dir=tmp_path, enable_checkpointing=True, callbacks=[CSVLogger()]
    )
    trainer.fit(Toy(), loader(6))
    rows = (trainer.run_dir / "metrics.csv").read_bytes()
    refuse("open", "metrics.csv", errno.ESTALE)
    again = quiet(max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True, callbacks=[CSVLogger()])
    with raises_recorded(ConfigError):
        again.fit(Toy(), loader(6), ckpt_path="last")
    monkeypatch.undo()
    assert (trainer.run_dir / "metrics.csv").read_bytes() == rows


def test_a_root_that_does_not_answer_is_an_error_with_a_message(
    refuse: Callable[[str, str, int], None], tmp_path: Path
) -> None:
    fit([steps()], default_root_dir=tmp_path)
    refuse("listdir", str(tmp_path), errno.EIO)
    with raises_recorded(ReadError):
        fit([steps()], default_root_dir=tmp_path, ckpt_path="last")


def test_a_pointer_that_cannot_be_written_is_reported_without_advice_for_readers(
    refuse: Callable[[str, str, int], None], tmp_path: Path
) -> None:
    refuse("open", "step=3/manifest.json", errno.EIO)
    with pytest.raises(CheckpointError) as caught:
        fit([steps(dirpath=tmp_path)])
    message = str(caught.value)
    assert "step=3 was written, and cannot write" in message
    assert "step=3/manifest.json cannot be read: Input/output error. 'last' finds it" in message
    assert "It may be intact" not in message


def test_a_lock_that_cannot_be_closed_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FolderLock(tmp_path)
    assert lock.acquire() is None
    close = os.close

    def failing(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", failing)
    lock.release()
    monkeypatch.undo()
    assert FolderLock(tmp_path).acquire(timeout=0) is None


def test_a_run_directory_that_cannot_be_looked_at_is_an_error_with_a_message(
    refuse: Callable[[str, str, int], None], tmp_path: Path
) -> None:
    refuse("stat", "version_0", errno.ESTALE)
    with raises_recorded(ConfigError):
        fit([steps()], default_root_dir=tmp_path)
