"""Several processes write one checkpoint completely or not at all, even if one of them fails."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.processes import run_distributed
from trainer.checkpoint.async_writer import BackgroundWriter
from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.flat_slice import EMPTY_SLICE, FlatSlice
from trainer.checkpoint.format import open_checkpoint, read_checkpoint
from trainer.checkpoint.manifest import read_manifest, verify_checkpoint
from trainer.checkpoint.process_group import StoreProcessGroup
from trainer.checkpoint.shards import Shard
from trainer.checkpoint.writing import write_checkpoint
from trainer.distributed.process_group import SingleProcess
from trainer.errors import CheckpointError
from trainer.precision import resolve_precision
from trainer.strategies import DDPStrategy

WORLD = 3


def full_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"w": torch.randn(5, 4, generator=generator), "b": torch.randn(7, generator=generator)}


def shard(tensor: torch.Tensor, rank: int, world: int) -> Shard:
    """Return this rank's consecutive elements; the last rank has none of a small tensor."""
    size = -(-tensor.numel() // world) if tensor.numel() > 7 else -(-tensor.numel() // (world - 1))
    low, high = min(rank * size, tensor.numel()), min((rank + 1) * size, tensor.numel())
    return Shard(tensor.flatten()[low:high], tuple(tensor.shape), FlatSlice(low, high - low))


def state(rank: int, world: int) -> dict[str, Any]:
    weights = full_state()
    shards: dict[str, Any] = {name: shard(tensor, rank, world) for name, tensor in weights.items()}
    shards["tied"] = shards["w"]
    shards["buffer"] = torch.arange(3)
    return {"model": shards, "optimizers": [{"m": {"w": shard(weights["w"] * 2, rank, world)}}], "step": 7}


def joined() -> SingleProcess:
    """Return the process group of a strategy."""
    strategy = DDPStrategy()
    strategy.setup_environment("cpu", resolve_precision("32-true"))
    return strategy.processes


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def write_and_fail(folder: str) -> dict[str, Any]:
    """Return the errors of good and bad writes on this process."""
    group = joined()
    rank, place = group.rank, Path(folder)
    own = state(rank, WORLD)
    results: dict[str, Any] = {}
    write_checkpoint(place / "good", own, info={"step": 7}, process_group=group)
    results["again"] = error_of(lambda: write_checkpoint(place / "good", own, process_group=group))
    write_checkpoint(place / "good", {**own, "step": 8}, overwrite=True, process_group=group)
    bad = {**own, "bad": object()} if rank == 1 else own
    results["a field on rank 1"] = error_of(lambda: write_checkpoint(place / "field", bad, process_group=group))
    lacking = {**own, "model": {**own["model"], "w": Shard(torch.empty(0), (5, 4), EMPTY_SLICE)}} if rank == 2 else own
    results["a part is missing"] = error_of(lambda: write_checkpoint(place / "missing", lacking, process_group=group))
    if rank == 1:
        # A folder with the name of this rank's file makes its write fail.
        from trainer.checkpoint.disk import LocalStorage

        def refuse(self: Any, path: Any, chunks: Any) -> Any:
            raise OSError(28, "No space left on device")

        LocalStorage.write_file = refuse  # type: ignore[method-assign]
    results["a full disk on rank 1"] = error_of(lambda: write_checkpoint(place / "full", own, process_group=group))
    results["left"] = sorted(path.name for path in place.iterdir())
    group.barrier()
    return results


def test_all_or_nothing(tmp_path: Path) -> None:
    results = run_distributed(write_and_fail, WORLD, str(tmp_path / "c"))
    for result in results:
        assert "exists" in result["again"]
        assert "bad" in result["a field on rank 1"]
        assert "set" in result["a field on rank 1"]
        assert "hold 14 of its 20 elements" in result["a part is missing"]
        assert "rank 1 cannot write" in result["a full disk on rank 1"]
        assert "No space left" in result["a full disk on rank 1"]
        assert result["left"] == ["good"]
    good = tmp_path / "c" / "good"
    assert verify_checkpoint(good) == []
    read = read_checkpoint(good)
    weights = full_state()
    assert read["step"] == 8
    assert torch.equal(read["model"]["w"], weights["w"])
    assert torch.equal(read["model"]["b"], weights["b"])
    assert read["model"]["tied"] is read["model"]["w"]
    assert torch.equal(read["optimizers"][0]["m"]["w"], weights["w"] * 2)
    files = set(read_manifest(good).files)
    assert {"model.00000.safetensors", "model.00001.safetensors", "model.00002.safetensors"} < files
    sizes = [(good / f"model.0000{rank}.safetensors").stat().st_size for rank in range(WORLD)]
    assert max(sizes) < 20 * 4 + 7 * 4 + 300  # a third of each, tied once, and a header


def write_in_threads(folder: str) -> dict[str, Any]:
    """Write in the background while the processes use their group."""
    group = joined()
    store: Any = group.store
    writer, done = BackgroundWriter(), threading.Event()
    own = state(group.rank, WORLD)
    results: dict[str, Any] = {}
    background = StoreProcessGroup(store.clone(), group.rank, WORLD, "one", timeout=60, sent=[])
    writer.start(Path(folder) / "background", own, {"step": 1}, done.set, group, background)
    for _ in range(50):
        dist.all_reduce(torch.ones(1000))
    writer.wait()
    results["written"] = (*writer.result(), done.is_set())
    sent: list[str] = []
    for number in range(20):
        one = StoreProcessGroup(store.clone(), group.rank, WORLD, f"many/{number}", timeout=60, sent=sent)
        gathered = one.all_gather_object(group.rank), one.broadcast_object(number), one.all_gather_object(number)
        assert gathered == ([0, 1, 2], number, [number] * WORLD)
    group.barrier()
    # One list, of the last exchange, for each process.
    keys = [f"many/{number}/{k}/{rank}" for number in range(20) for k in (1, 2, 3) for rank in range(WORLD)]
    results["left"] = sum(store.check([key]) for key in keys)
    group.barrier()
    if group.rank != 2:
        lonely = StoreProcessGroup(store.clone(), group.rank, WORLD, "two", timeout=0.5, sent=[])
        results["nobody comes"] = error_of(lambda: lonely.all_gather_object(1))
    group.barrier()
    os.sync()
    return results


def open_damaged(folders: list[str]) -> list[str]:
    group = joined()
    return [
        error_of(partial(open_checkpoint, folder, ("model",), verify=True, process_group=group)) for folder in folders
    ]


def test_in_the_background_and_damage_afterwards(tmp_path: Path) -> None:
    results = run_distributed(write_in_threads, WORLD, str(tmp_path))
    for result in results:
        path, error, done = result["written"]
        assert (path, error, done) == (str(tmp_path / "background"), None, True)
        assert result["left"] == WORLD
    assert results[0]["nobody comes"].startswith(WriteError.__name__)
    assert torch.equal(read_checkpoint(tmp_path / "background")["model"]["w"], full_state()["w"])

    files = ["model.00002.safetensors", "optimizers.00000.safetensors", "checkpoint.json"]
    for file in files:
        shutil.copytree(tmp_path / "background", tmp_path / file)
        content = bytearray((tmp_path / file / file).read_bytes())
        content[-1] ^= 1
        (tmp_path / file / file).write_bytes(content)
    for messages in run_distributed(open_damaged, 2, [str(tmp_path / file) for file in files]):
        assert all(file in message for file, message in zip(files, messages, strict=True)), messages
