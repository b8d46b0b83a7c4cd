"""Background writes save a consistent copy, and report how they end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.messages import raises_recorded
from trainer.checkpoint.async_writer import BackgroundWriter, PinnedStagingBuffer
from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import is_committed
from trainer.checkpoint.serialization import serialize
from trainer.errors import CheckpointError


class Gate:
    """A callable for the writer to call after the commit, which blocks until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(600)


def nothing() -> None:
    """Do nothing after the commit."""


def end(writer: BackgroundWriter) -> str | None:
    """Return the path that was committed."""
    writer.wait()
    path, error = writer.result()
    if error is not None:
        raise error
    return path


def test_what_changes_after_the_start_is_not_written(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    weight, numbers = torch.arange(6.0).reshape(2, 3), [1, 2]
    state = {"model": {"w": weight, "tied": weight, "rows": weight.t()}, "numbers": numbers}
    info = {"step": 3}
    gate = Gate()
    # The thread cannot be stopped before it writes, so the tensors change at once, and many times.
    for round_ in range(20):
        weight.copy_(torch.arange(6.0).reshape(2, 3))
        numbers[:] = [1, 2]
        writer.start(tmp_path / str(round_), state, info, gate)
        weight.zero_()
        numbers.append(3)
        gate.opened.set()
        assert end(writer) == str(tmp_path / str(round_))
        found = read_checkpoint(tmp_path / str(round_))
        assert found["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found["model"]["rows"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert found["model"]["tied"] is found["model"]["w"]
        assert found["numbers"] == [1, 2]


def test_every_kind_of_tensor_is_copied_exactly(
    tmp_path: Path, random_state: Callable[[int], dict[str, Any]], assert_same: Callable[[Any, Any], None]
) -> None:
    writer = BackgroundWriter()
    for seed in range(10):
        pair = torch.tensor([1 + 2j, 3 + 4j])
        odd = {"conj": pair.conj(), "neg": pair.conj().imag, "one": pair.real[:1], "none": pair.real[:0]}
        given = {**random_state(seed), "odd": odd}
        writer.start(tmp_path / str(seed), given, {}, nothing)
        end(writer)
        assert_same(read_checkpoint(tmp_path / str(seed)), given)


def test_the_memory_is_used_again() -> None:
    memory = PinnedStagingBuffer()
    tensors = {"model": {"a": torch.ones(1000), "b": torch.ones(3, dtype=torch.bfloat16)}, "optimizers": {}}
    first = memory.copy(tensors)["model"]["a"].data_ptr()
    tensors["model"]["a"].fill_(2)
    again = memory.copy(tensors)
    assert again["model"]["a"].data_ptr() == first
    assert again["model"]["a"].tolist() == [2] * 1000
    assert again["model"]["b"].tolist() == [1] * 3
    smaller = memory.copy({"model": {"a": torch.zeros(10)}})
    assert smaller["model"]["a"].data_ptr() == first
    larger = memory.copy({"model": {"a": torch.arange(5000)}})
    assert larger["model"]["a"].tolist() == list(range(5000))


def test_the_memory_is_given_back(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    writer.start(tmp_path / "a", {"x": torch.ones(10)}, {}, nothing)
    block = weakref.ref(writer._memory._block)
    writer.close()
    assert is_committed(tmp_path / "a")
    assert block() is None


def test_the_caller_goes_on_while_it_is_written_and_is_notified_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BackgroundWriter()
    for name in ("a", "b"):
        gate = Gate()
        writer.start(tmp_path / name, {"x": torch.ones(10)}, {}, gate)
        assert gate.reached.wait(600)
        assert is_committed(tmp_path / name)  # `on_committed` runs after the commit
        assert writer.result() == (None, None)
        threading.Timer(0.1, gate.opened.set).start()
        writer.wait(due=True)
        assert writer.result() == (str(tmp_path / name), None)
        assert writer.result() == (None, None)
    assert caplog.text.count("training waits") == 1


def test_an_error_of_the_thread_is_the_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = BackgroundWriter()
    writer.start(tmp_path / "file" / "a", {"x": torch.ones(10)}, {}, nothing)
    with raises_recorded(WriteError):
        end(writer)

    def fail() -> None:
        raise ZeroDivisionError("in the thread")

    writer.start(tmp_path / "b", {}, {}, fail)
    with raises_recorded(WriteError):
        end(writer)
    writer.start(tmp_path / "c", {}, {}, nothing)
    assert end(writer) == str(tmp_path / "c")


def test_what_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    with raises_recorded(CheckpointError):
        writer.start(tmp_path / "a", {"x": {len}}, {}, nothing)
    assert end(writer) is None


def test_a_split_state_does_not_share_its_containers() -> None:
    """Splitting copies everything but the tensors."""
    given: dict[str, Any] = {"a": [1, {"b": (2, [3])}]}
    data = serialize(given, "state").data
    given["a"][1]["b"][1].append(4)
    given["a"].append(5)
    assert data == {"a": [1, {"b": {"$tuple": [2, [3]]}}]}


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_copied_while_the_caller_goes_on() -> None:
    memory = PinnedStagingBuffer()
    tensor = torch.ones(1 << 24, device="cuda")
    for value in range(3):
        tensor.fill_(value)
        copy = memory.copy({"model": {"w": tensor, "rows": tensor.reshape(1 << 12, -1).t()}})["model"]
        tensor.fill_(-1)  # later work on the stream
        memory.wait()
        assert copy["w"].is_pinned()
        assert bool((copy["w"] == value).all())
        assert bool((copy["rows"] == value).all())
