from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.messages import raises_recorded
from trainer.distributed.devices import choose_accelerator, device_number, has_streams, parse_devices
from trainer.errors import ConfigError


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the devices that torch finds."""

    def found_devices(cuda: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    return found_devices


@pytest.mark.parametrize(
    ("asked", "cuda", "mps", "device_type", "reason"),
    [
        ("auto", 0, False, "cpu", "auto: the first available of cuda, mps, tpu, cpu"),
        ("auto", 2, True, "cuda", "auto: the first available of cuda, mps, tpu, cpu"),
        ("auto", 0, True, "mps", "auto: the first available of cuda, mps, tpu, cpu"),
        ("gpu", 1, False, "cuda", "gpu: the first available of cuda, mps"),
        ("gpu", 0, True, "mps", "gpu: the first available of cuda, mps"),
        ("cuda", 1, True, "cuda", "cuda: as asked"),
        ("mps", 1, True, "mps", "mps: as asked"),
        ("cpu", 1, True, "cpu", "cpu: as asked"),
    ],
)
def test_accelerator(found: Any, asked: str, cuda: int, mps: bool, device_type: str, reason: str) -> None:
    found(cuda, mps)
    assert choose_accelerator(asked) == (device_type, reason)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("cuda", "accelerator='cuda', but there is none"),
        ("gpu", "accelerator='gpu', but there is none"),
        ("mps", "accelerator='mps', but there is none"),
        pytest.param(
            *("tpu", "accelerator='tpu', but torch_tpu is not installed"),
            marks=pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed"),
        ),
        ("cudaa", "unknown accelerator 'cudaa'. Did you mean 'cuda'?"),
    ],
)
def test_accelerator_that_is_not_there(found: Any, asked: str, message: str) -> None:
    found()
    with pytest.raises(ConfigError) as error:
        choose_accelerator(asked)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("devices", "device_type", "count", "ids"),
    [
        *(("auto", "cpu", 1, None), ("auto", "cuda", 4, None), ("auto", "mps", 1, None), (2, "cpu", 2, None)),
        *(("2", "cpu", 2, None), (3, "cuda", 3, None), (-1, "cuda", 4, None), ("-1", "cuda", 4, None)),
        *(([2, 0], "cuda", 2, [2, 0]), ((1,), "cuda", 1, [1]), ("0, 3", "cuda", 2, [0, 3]), ("1,", "cuda", 1, [1])),
        *((1, "mps", 1, None), ([0], "mps", 1, [0])),
    ],
)
def test_devices(found: Any, devices: Any, device_type: str, count: int, ids: list[int] | None) -> None:
    found(cuda=4)
    assert parse_devices(devices, device_type)[:2] == (count, ids)


@pytest.mark.parametrize(
    ("devices", "device_type"),
    [
        *((0, "cpu"), (-2, "cuda"), (5, "cuda"), ([0, 4], "cuda"), ([-1], "cuda"), ([1, 1], "cuda"), ("1,1", "cuda")),
        *(([], "cuda"), (2, "mps"), ([1], "mps"), (-1, "cpu"), ([0, 1], "cpu"), ("two", "cpu"), ("", "cpu")),
        *((100_000, "cpu"), (1.0, "cpu"), (None, "cpu")),
    ],
)
def test_bad_devices(found: Any, devices: Any, device_type: str) -> None:
    found(cuda=4)
    with raises_recorded(ConfigError):
        parse_devices(devices, device_type)


@pytest.mark.parametrize(
    ("local_rank", "ids", "visible", "expected"), [(0, None, 1, 0), (3, None, 1, 0), (3, None, 4, 3), (1, [2, 3], 4, 3)]
)
def test_a_process_that_sees_one_gpu_takes_it(local_rank: int, ids: Any, visible: int, expected: int) -> None:
    assert device_number(local_rank, ids, visible) == expected


@pytest.mark.parametrize(("local_rank", "ids", "visible"), [(2, None, 2), (1, [0, 3], 2), (1, [0, 1], 1)])
def test_more_processes_than_gpus_are_reported(local_rank: int, ids: Any, visible: int) -> None:
    with raises_recorded(ConfigError):
        device_number(local_rank, ids, visible)


def test_copies_to_mps_are_not_asynchronous_even_if_torch_has_streams_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "Stream", torch.Stream, raising=False)
    assert [has_streams(kind) for kind in ("cpu", "mps", "cuda")] == [False, False, True]
