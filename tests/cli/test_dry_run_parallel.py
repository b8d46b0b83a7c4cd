"""Dry runs and estimates of one model over many processes: the mesh, the bubble, the memory of the largest stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.project import Command, done
from trainer.cli.doctor.results import gib
from trainer.model.pipeline_stages import cut_blocks

NET = """\
from tests.helpers.decoder import Architecture, Decoder


class Net(Decoder):
    def __init__(self, layers: int = 16):
        super().__init__(Architecture(layers, 128, heads=8, vocabulary=512, kv_heads=8, head_dim=16, intermediate=256))
"""
LAYERS, HIDDEN, MLP, TABLE = 16, 128, 256, 512 * 128
LARGE = ("--config", "run.yaml", "--dry-run", "--world-size", "1024", "--nproc-per-node", "8", "--no-data")


@pytest.fixture
def net(project: Path) -> Path:
    (project / "net.py").write_text(NET)
    return project


def write_config(folder: Path, window: int = 32, **strategy: Any) -> None:
    trainer = {"max_epochs": 1, "accumulate_grad_batches": window}
    trainer |= {"strategy": {"class_path": "fsdp", "init_args": strategy}}
    (folder / "run.yaml").write_text(json.dumps({"module": "net.py:Net", "trainer": trainer}))


def expected(tensor: int, sharing: int, pipeline: int) -> int:
    """Return the bytes of weights, gradients and optimizer of the largest stage."""
    split, norms = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP, 2 * HIDDEN
    sizes = [split + norms] * LAYERS
    sizes[0] += TABLE
    sizes[-1] += HIDDEN + TABLE
    ends, found = cut_blocks(sizes, pipeline), []
    for start, end in zip([0, *ends], ends, strict=False):
        first, last = start == 0, end == LAYERS
        elements = (end - start) * (split // tensor + norms) + (first + last) * TABLE // tensor + last * HIDDEN
        # AdamW counts the steps of each tensor.
        found.append(4 * 4 * elements // sharing + 4 * (9 * (end - start) + first + 2 * last))
    return max(found)


@pytest.mark.parametrize(
    ("readers", "context", "tensor", "pipeline", "mesh"),
    [
        (16, 1, 8, 8, "8 stage x 16 shard x 8 tensor"),
        (8, 8, 2, 8, "8 stage x 64 shard x 2 tensor"),
        (128, 1, 8, 1, "1 stage x 128 shard x 8 tensor"),
    ],
)
def test_a_thousand_processes(
    command: Command, net: Path, readers: int, context: int, tensor: int, pipeline: int, mesh: str
) -> None:
    write_config(net, tensor_parallel=tensor, context_parallel=context, pipeline_parallel=pipeline)
    out, _ = done(command("fit", *LARGE))
    assert f"mesh: {mesh}" in out
    (memory,) = (line for line in out.splitlines() if "memory" in line)
    # With 128 readers there are fewer rows than shards, and some processes hold one more than their share.
    assert readers > 16 or f": {gib(expected(tensor, readers * context, pipeline))}, at times" in memory
    assert ("8 stages, 32 micro-batches: each stage waits 18% of the time" in out) == (pipeline > 1)


def test_a_window_that_is_shorter_than_the_pipeline_is_a_warning(command: Command, net: Path) -> None:
    write_config(net, window=4, pipeline_parallel=8)
    out, _ = done(command("fit", *LARGE))
    (line,) = (line for line in out.splitlines() if "bubble" in line)
    assert line.startswith("WARN")
    assert "64% of the time. Set accumulate_grad_batches to 32" in out.replace("\n", " ").replace("  ", " ")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3 needs a multiple of 3 processes"),
        ({"tensor_parallel": 256}, "tensor_parallel=256 does not divide the 128 outputs"),
        ({"pipeline_parallel": 32}, "pipeline_parallel=32 needs at least 32 repeated blocks"),
    ],
)
def test_what_cannot_be_split_is_refused(command: Command, net: Path, strategy: dict[str, int], message: str) -> None:
    write_config(net, **strategy)
    code, out, _ = command("fit", *LARGE)
    assert code == 1
    assert message in " ".join(out.split())


def test_layers_that_are_split_over_machines_are_a_warning(
    command: Command, net: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(net, tensor_parallel=16)
    done(command("fit", *LARGE))
    assert "tensor_parallel=16 does not divide the 8 processes of a machine" in caplog.text


def test_the_estimate_of_a_split_model(command: Command, net: Path) -> None:
    write_config(net, tensor_parallel=2, pipeline_parallel=4)
    out, _ = done(command("estimate", "--config", "run.yaml", "--devices", "16", "--json"))
    rows = json.loads(out)["strategies"]
    (own,) = (row for row in rows if row["label"].startswith("fsdp as given"))
    assert own["device"] == expected(tensor=2, sharing=2, pipeline=4)
    # A stage of a split model keeps less than the full model.
    shape = ("--hidden", "128", "--sequence", "16", "--batch", "1")
    _, out, _ = command("estimate", "--config", "run.yaml", "--devices", "16", *shape, "--json")
    kept = {row["label"]: row["activations"] for row in json.loads(out)["strategies"]}
    assert 0 < kept.pop("fsdp as given") < min(kept.values())
