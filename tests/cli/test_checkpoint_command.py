"""`trainer checkpoint` lists, shows, verifies and exports checkpoints."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers.processes import run_python
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.main import main
from trainer.testing import flip_byte, largest_file, truncate


def state(step: int) -> dict[str, object]:
    embedding = torch.full((5, 3), float(step))
    return {
        "model": {
            "net.embedding.weight": embedding,
            "net.head.weight": embedding,  # tied
            "net.head.bias": torch.arange(5.0),
            "phase": torch.zeros(2, dtype=torch.complex64),
        },
        "optimizers": [{"state": {"net.head.bias": {"exp_avg": torch.ones(5)}}}],
        "progress": {"step": step, "epoch": 1, "batch": 4, "samples": 12},
        "hyperparameters": {"module": {"lr": 0.01, "name": "x\x1b[31mred"}, "data": {}},
        "strategy": "single_device",
        "precision": "32-true",
        "world_size": 1,
        "versions": {"torch": "2.9.0"},
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with three checkpoints."""
    folder = tmp_path / "runs" / "version_0" / "checkpoints"
    for step, loss in ((10, 0.5), (20, 0.25), (30, 0.75)):
        info = {"step": step, "epoch": 1, "metrics": {"val_loss": loss, "acc": 1.0}}
        write_checkpoint(folder / f"step={step}", state(step), info=info)
    directory = CheckpointDirectory(folder)
    directory.set_pointer("last", "step=30")
    directory.set_pointer("best", "step=20")
    return folder.parent


class Printed:
    """The exit code and the output of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def checkpoint(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Return a function that runs `trainer checkpoint ...`."""

    def call(*arguments: object) -> Printed:
        capsys.readouterr()
        code = main(["checkpoint", *map(str, arguments)])
        printed = capsys.readouterr()
        return Printed(code, printed.out, printed.err)

    return call


# -- ls ----------------------------------------------------------------------------------------------------------------


def test_ls_lists_what_is_there(checkpoint, run: Path) -> None:
    for path in (run, run / "checkpoints", run.parent, run.parent.parent):  # runs at any depth
        printed = checkpoint("ls", path)
        assert checkpoint("list", path).out == printed.out
        assert printed.code == 0
        lines = printed.out.splitlines()
        assert lines[0] == str(run / "checkpoints")
        assert lines[1].split() == ["name", "step", "epoch", "val_loss", "acc", "size", "written", "state"]
        assert [line.split()[:5] for line in lines[2:]] == [
            ["step=10", "10", "1", "0.5", "1"],
            ["step=20", "20", "1", "0.25", "1"],
            ["step=30", "30", "1", "0.75", "1"],
        ]
        assert [line.split()[-2:] for line in lines[3:]] == [["best", "ok"], ["last", "ok"]]


def test_ls_names_damage_and_leftovers(checkpoint, run: Path) -> None:
    folder = run / "checkpoints"
    truncate(folder / "step=10" / "model.safetensors", -1)
    flip_byte(folder / "step=20" / "model.safetensors", -1)
    (folder / "step=30" / "manifest.json").unlink()
    (folder / ".tmp-step=40-1-0123abcd").mkdir()
    (folder / "notes").mkdir()
    printed = checkpoint("ls", run)
    states = {line.split()[0]: line.split()[-1] for line in printed.out.splitlines()[2:5]}
    assert states == {"step=10": "damaged", "step=20": "ok", "step=30": "damaged"}
    assert "model.safetensors has" in printed.out
    assert "has no manifest.json" in printed.out
    assert ".tmp-step=40-1-0123abcd: being written, or left by a process that was killed" in printed.out
    assert "notes" not in printed.out
    assert "step=20" in [
        line.split()[0] for line in checkpoint("ls", run, "--verify").out.splitlines() if "damaged" in line
    ]


def test_ls_as_json_and_with_a_metric(checkpoint, run: Path) -> None:
    rows = json.loads(checkpoint("ls", run, "--json").out)
    assert [row["info"]["step"] for row in rows] == [10, 20, 30]
    assert [row["pointers"] for row in rows] == [[], ["best"], ["last"]]
    assert "val_loss" not in checkpoint("ls", run, "--metric", "acc").out
    one = json.loads(checkpoint("ls", run / "checkpoints" / "step=10", "--json").out)
    assert [row["bytes"] > 0 and row["damage"] for row in one] == [[]]


def test_ls_lets_names_of_a_stranger_not_control_the_terminal(checkpoint, run: Path) -> None:
    info = {"step": 40, "metrics": {"\x1b[31m": 1.0}}
    write_checkpoint(run / "checkpoints" / "step\x1b[31m", state(40), info=info)
    printed = checkpoint("ls", run, "--metric", "\x1b[31m").out
    assert printed.replace("\n", "").isprintable()
    assert r"step\x1b[31m" in printed


def test_runs_at_several_depths_are_all_looked_at(checkpoint, run: Path, tmp_path: Path) -> None:
    deeper = tmp_path / "runs" / "digits" / "version_0" / "checkpoints"
    write_checkpoint(deeper / "step=40", state(40), info={"step": 40})
    listed = [line for line in checkpoint("ls", "runs").out.splitlines() if line.endswith("checkpoints")]
    assert listed == ["runs/digits/version_0/checkpoints", "runs/version_0/checkpoints"]
    assert "4 of 4 checkpoints are intact" in checkpoint("verify", "runs").out
    assert json.loads(checkpoint("show", "runs", "--json").out)["info"]["step"] == 40  # which was written last
    os.utime(deeper / "step=40" / "manifest.json", (1, 1))
    assert json.loads(checkpoint("show", "runs", "--json").out)["info"]["step"] == 30
    flip_byte(deeper / "step=40" / "model.safetensors", -1)
    printed = checkpoint("verify", "runs")
    assert printed.code == 1
    assert "runs/digits/version_0/checkpoints/step=40: DAMAGED" in printed.out


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_prints_what_a_checkpoint_holds(checkpoint, run: Path) -> None:
    printed = checkpoint("show", run)
    assert printed.code == 0
    words = [" ".join(line.split()) for line in printed.out.splitlines()]
    for line in (
        f"checkpoint {run / 'checkpoints' / 'step=30'}",
        *("step 30", "epoch 1", "batch 4", "samples 12", "strategy single_device", "precision 32-true", "world size 1"),
        *("versions torch 2.9.0", "val_loss 0.75", "module.lr 0.01"),
        *("net.embedding.weight float32 [5, 3] 60 B", "phase complex64 [2] 16 B"),
    ):
        assert line in words, (line, words)
    assert "model.safetensors: 3 tensors, " in printed.out
    assert "\x1b" not in printed.out  # a checkpoint may come from anybody; a terminal obeys such characters
    assert r"x\x1b[31mred" in printed.out


@pytest.mark.parametrize(("wanted", "step"), [("last", 30), ("best", 20), ("step=10", 10), (None, 30)])
def test_one_of_a_run_is_chosen(checkpoint, run: Path, wanted: str | None, step: int) -> None:
    printed = checkpoint("show", run, "--json", *(["--ckpt", wanted] if wanted else []))
    found = json.loads(printed.out)
    assert found["data"]["progress"]["step"] == step
    assert found["data"]["model"]["phase"] == {"tensor": "phase", "dtype": "complex64", "shape": [2]}


def test_a_path_may_end_in_a_pointer(checkpoint, run: Path, tmp_path: Path) -> None:
    best, last = run / "checkpoints" / "best", run / "checkpoints" / "last"
    assert json.loads(checkpoint("show", best, "--json").out)["data"]["progress"]["step"] == 20
    assert "step=30: intact" in checkpoint("verify", last).out
    assert [one["path"].rpartition("/")[2] for one in json.loads(checkpoint("ls", best, "--json").out)] == ["step=20"]
    assert checkpoint("export", last, tmp_path / "last.safetensors").code == 0
    refused = checkpoint("show", best, "--ckpt", "last")
    assert refused.code == 2
    assert "is itself a checkpoint: leave out --ckpt last" in refused.err
    (run / "checkpoints" / "best.json").unlink()
    assert json.loads(checkpoint("show", best, "--json").out)["data"]["progress"]["step"] == 30  # then it is the last


def test_long_lists_of_tensors_are_cut_unless_all_are_asked_for(checkpoint, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {"model": {f"w{i:03}": torch.ones(1) for i in range(100)}})
    assert "... 80 more; --all shows them" in checkpoint("show", tmp_path / "c").out
    assert "w099" in checkpoint("show", tmp_path / "c", "--all").out


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_says_yes_or_names_the_file(checkpoint, run: Path) -> None:
    assert checkpoint("verify", run).code == 0
    flip_byte(run / "checkpoints" / "step=20" / "optimizers.safetensors", -3, mask=1)
    printed = checkpoint("verify", run)
    assert printed.code == 1
    assert "step=20: DAMAGED" in printed.out
    assert "optimizers.safetensors is damaged: its checksum differs" in printed.out
    assert "2 of 3 checkpoints are intact" in printed.out
    assert checkpoint("verify", run, "--ckpt", "last").code == 0
    assert checkpoint("verify", run, "--ckpt", "best").code == 1
    assert checkpoint("verify", run / "checkpoints" / "step=20").code == 1


def test_verify_looks_at_pointers_and_manifests_too(checkpoint, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "checkpoints" / "best.json").write_text("{}")
    printed = checkpoint("verify", run)
    assert printed.code == 1
    assert "best.json points to no checkpoint" in printed.out
    CheckpointDirectory(run / "checkpoints").set_pointer("best", "step=20")
    (run / "checkpoints" / "step=10" / "manifest.json").unlink()
    printed = checkpoint("verify", run)
    assert printed.code == 1
    assert "manifest.json" in printed.out
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


# -- export ------------------------------------------------------------------------------------------------------------


def test_export_writes_what_the_safetensors_library_reads(checkpoint, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    printed = checkpoint("export", run, out, "--ckpt", "best")
    assert printed.code == 0, printed.err
    assert "'net.head.weight' is tied to 'net.embedding.weight' and written once; --expand-tied" in printed.err
    assert "'phase' is torch.complex64, which safetensors lacks: its bytes are written, as uint8" in printed.err
    weights = load_file(out)
    assert sorted(weights) == ["net.embedding.weight", "net.head.bias", "phase"]
    assert torch.equal(weights["net.embedding.weight"], torch.full((5, 3), 20.0))
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_export_under_every_name_and_without_a_prefix(checkpoint, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    assert checkpoint("export", run, out, "--expand-tied", "--prefix", "net.").code == 0
    weights = load_file(out)
    assert sorted(weights) == ["embedding.weight", "head.bias", "head.weight"]
    assert torch.equal(weights["head.weight"], weights["embedding.weight"])
    module = torch.nn.Module()
    module.head = torch.nn.Linear(3, 5)
    module.embedding = torch.nn.Embedding(5, 3)
    module.load_state_dict(weights)
    printed = checkpoint("export", run, tmp_path / "other.safetensors", "--prefix", "nett.")
    assert printed.code == 2
    assert "no weight's name begins with 'nett.'. Did you mean 'net.'?" in printed.err
    assert not (tmp_path / "other.safetensors").exists()


def test_export_replaces_only_with_force_and_atomically(checkpoint, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    out.write_text("precious")
    printed = checkpoint("export", run, out)
    assert printed.code == 2
    assert "exists: give another name. --force replaces the file" in printed.err
    with largest_file(200):
        printed = checkpoint("export", run, out, "--force")
    assert printed.code == 1
    assert "File too large" in printed.err
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "weights.safetensors"]
    flip_byte(run / "checkpoints" / "step=30" / "model.safetensors", -1)
    printed = checkpoint("export", run, out, "--force")
    assert printed.code == 1
    assert "model.safetensors is damaged" in printed.err
    assert out.read_text() == "precious"
    assert checkpoint("export", run, out, "--force", "--ckpt", "best").code == 0
    assert len(load_file(out)) == 3


def test_export_to_several_files_with_an_index(checkpoint, run: Path, tmp_path: Path) -> None:
    """The files are those of transformers: model-00001-of-00002.safetensors and an index of the weights."""
    out = tmp_path / "weights"
    printed = checkpoint("export", run, out, "--max-shard-size", "0.05KB", "--expand-tied", "--prefix", "net.")
    assert printed.code == 0, printed.err
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    read = {name: weight for file in files for name, weight in load_file(out / file).items()}
    assert read.keys() == index["weight_map"].keys() == {"embedding.weight", "head.bias", "head.weight"}
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in read.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(out / file)[name], read[name])
    assert checkpoint("export", run, out, "--max-shard-size", "1GB").code == 2
    assert checkpoint("export", run, out, "--max-shard-size", "1GB", "--force").code == 0
    assert len(load_file(out / "model-00001-of-00001.safetensors")) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "weights"]


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16"])
def test_export_in_another_dtype(checkpoint, run: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "weights.safetensors"
    assert checkpoint("export", run, out, "--ckpt", "best", "--dtype", dtype).code == 0
    weights = load_file(out)
    assert weights["net.embedding.weight"].dtype is torch.bfloat16
    assert torch.equal(weights["net.embedding.weight"], torch.full((5, 3), 20.0, dtype=torch.bfloat16))


def test_numbers_that_a_dtype_cannot_hold_are_not_exported_as_infinite(checkpoint, tmp_path: Path) -> None:
    large = state(10)
    large["model"]["net.head.bias"][1] = 70000.0
    write_checkpoint(tmp_path / "one", large, info={"step": 10})
    result = checkpoint("export", tmp_path / "one", tmp_path / "out.safetensors", "--dtype", "float16")
    assert result.code == 1
    assert "numbers up to 70000, too large for torch.float16: leave --dtype out, or use bfloat16" in result.err
    assert not (tmp_path / "out.safetensors").exists()


# -- help and mistakes -------------------------------------------------------------------------------------------------


def test_looking_at_checkpoints_imports_no_torch(run: Path) -> None:
    lines = [["ls"], ["ls", "--verify", "--json"], ["show"], ["show", "--json"], ["verify"]]
    commands = [["checkpoint", name, str(run), *options] for name, *options in lines]
    code = "import sys\nsys.modules['torch'] = None\nfrom trainer.__main__ import main\n"
    ended = run_python(f"{code}print([main(command) for command in {commands!r}])").check()
    assert ended.stdout.endswith("[0, 0, 0, 0, 0]\n")
    assert "net.embedding.weight  float32    [5, 3]" in ended.stdout
