"""The examples do what their README says: its commands are run, shortened, and what they leave behind is looked at."""

from __future__ import annotations

import csv
import os
import re
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import ROOT, Result, Running
from trainer.checkpoint.format import verify_checkpoint

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
README = ROOT / "examples" / "README.md"

SHORTER = {
    "trainer fit --config examples/digits": "--trainer.max_epochs 2 --trainer.limit_train_batches 3",
    "trainer fit --config examples/digits/config.yaml --ckpt-path last": (
        "--trainer.max_epochs 3 --trainer.limit_train_batches 3"
    ),
    "trainer fit --config examples/gpt": (
        "--trainer.max_steps 3 --trainer.val_check_interval 2 --data.val_pieces 20 --module.width 16"
    ),
    "trainer": "",
    "python -m examples.digits.train": "--max-epochs 1",
    "python -m examples.gpt.sample": "--length 5",
    "python -m examples.gan.train": "--max-steps 3",
    "python -m examples.own_callback.train": "",
}
"""The beginning of a command: what makes it short. The longest one that fits is taken."""


def commands(section: str) -> list[str]:
    """The commands in the `bash` blocks below a heading of the README."""
    text = re.split(rf"^## {section}\b.*$", README.read_text(), flags=re.MULTILINE)[1]
    text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def shortened(command: str) -> list[str]:
    """The command's words, with this Python, and with what makes it short."""
    start = max((start for start in SHORTER if command.startswith(start)), key=len)
    words = shlex.split(f"{command} {SHORTER[start]}")
    return [sys.executable, *(["-m", "trainer"] if words[0] == "trainer" else []), *words[1:]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Result]:
    """Runs a command of the README, shortened, in a directory that has nothing but the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run(command: str) -> Result:
        return Running(shortened(command), tmp_path, ENVIRONMENT).wait(120).check()

    return run


def test_every_command_of_the_readme_is_run_below() -> None:
    headings = re.findall(r"^## (\w+)", README.read_text(), flags=re.MULTILINE)
    assert [heading for heading in headings if commands(heading)] == ["digits", "gpt", "gan", "own_callback"]


def test_every_file_that_can_be_run_tells_how() -> None:
    for path in sorted((ROOT / "examples").rglob("*.py")):
        if "__main__" in path.read_text():
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            assert f"\n    python -m {name}" in path.read_text().split('"""')[1], path
    for path in sorted((ROOT / "examples").rglob("config.yaml")):
        assert f"#     trainer fit --config {path.relative_to(ROOT)}\n" in path.read_text()


def test_digits(run: Callable[[str], Result]) -> None:
    outputs = [run(command).stdout for command in commands("digits")]
    assert "val_acc" in outputs[0]
    assert "test_acc" in outputs[1]
    # Two epochs of 3 steps, and one more of the same run.
    assert "after 6 steps" in outputs[0]
    assert "after 9 steps" in outputs[2]
    assert "after 6 steps" in outputs[3]
    assert "test accuracy: 0." in outputs[4]
    first = Path("runs/digits/version_0")
    assert {"config.yaml", "checkpoints"} <= {path.name for path in first.iterdir()}
    for checkpoint in [path for path in (first / "checkpoints").iterdir() if path.is_dir()]:
        assert verify_checkpoint(checkpoint) == []
    with open(next(first.rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    assert [row["val_acc"] for row in rows if row["val_acc"]], rows
    assert list(first.rglob("events.out.tfevents.*"))


def test_gpt(run: Callable[[str], Result]) -> None:
    outputs = [run(command).stdout for command in commands("gpt")]
    assert "val_bits_per_byte" in outputs[0]
    assert outputs[1].startswith("def ")
    assert "after 3 steps" in outputs[2]


def test_gan(run: Callable[[str], Result]) -> None:
    for command in commands("gan"):
        lines = run(command).stdout.splitlines()
        # One step is one batch, though two optimizers step in it.
        assert "steps: 3" in lines
        assert any(line.startswith("Fréchet distance to the real images: ") for line in lines)
        assert len(lines[-1]) == 8 * 16 + 7 * 2


def test_own_callback(run: Callable[[str], Result]) -> None:
    [command] = commands("own_callback")
    text = run(command).stdout
    before, after = text.split("The same run goes on")
    assert len(re.findall(r"epoch \d+: val_acc", before)) == 2
    # Its state came back: the second run knows the epochs of the first one, and its own.
    assert re.findall(r"epoch .*", after)[:2] == re.findall(r"epoch .*", before)
    assert "val_acc reached 0.98" in after


@pytest.mark.slow
def test_digits_learns(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-m", "trainer", "fit", "--config", "examples/digits/config.yaml"]
    text = Running(command, tmp_path, ENVIRONMENT).wait(240).check().stdout
    match = re.search(r"\bval_acc\s+(0\.\d+)", text)
    assert match is not None, text
    assert float(match[1]) > 0.97


@pytest.mark.slow
def test_gpt_learns(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-m", "trainer", "fit", "--config", "examples/gpt/config.yaml"]
    text = Running([*command, "--trainer.max_steps", "250"], tmp_path, ENVIRONMENT).wait(240).check().stdout
    match = re.search(r"\bval_bits_per_byte\s+(\d\.\d+)", text)
    assert match is not None, text
    # 8 bits before it has learnt anything, 5.1 for a model that only knows how often each byte occurs.
    assert float(match[1]) < 4.2


# -- the parts, without a trainer -------------------------------------------------------------------------------------


def test_a_piece_depends_on_its_number_alone() -> None:
    from examples.gpt.data import IGNORED, Crops

    files = [bytes(range(10)), b"xy" * 20]
    one, other = Crops(files, length=8, count=50, seed=3), Crops(files, length=8, count=50, seed=3)
    different = Crops(files, length=8, count=50, seed=4)
    in_order = [one[i] for i in range(50)]
    backwards = [other[i] for i in reversed(range(50))][::-1]
    for (x, y), (same_x, same_y) in zip(in_order, backwards, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
    assert any(not torch.equal(in_order[i][0], different[i][0]) for i in range(50))
    for x, y in in_order:
        length = int((y != IGNORED).sum())
        assert 1 <= length <= 8
        # Each target is the byte after its input, and a piece never goes on into the next file.
        assert torch.equal(x[1:length], y[: length - 1])
        assert len({byte < 10 for byte in [*x[:length].tolist(), int(y[length - 1])]}) == 1


def test_the_gpt_looks_back_only_and_ties_its_weights() -> None:
    from examples.gpt import GPT

    gpt = GPT(context=16, layers=2, heads=2, width=8)
    gpt.configure_model()
    gpt.eval()
    assert gpt.net is not None
    assert gpt.net.head.weight is gpt.net.token_embedding.weight
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 0
    difference = (gpt(tokens) - gpt(changed)).abs().amax(dim=(0, 2))
    assert difference[:10].max() < 1e-6
    assert difference[10:].min() > 1e-6


def test_the_learning_rate_rises_and_falls() -> None:
    from examples.gpt.module import warmup_then_cosine

    rates = [warmup_then_cosine(step, 10, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == max(rates) == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_the_digits_are_split_the_same_way_every_time() -> None:
    from examples.digits import DigitsData

    one, other = DigitsData(), DigitsData()
    one.setup("fit")
    other.setup("test")
    assert [len(part) for part in (one.train, one.val, one.test)] == [1197, 300, 300]
    assert torch.equal(one.test.tensors[0], other.test.tensors[0])
    images = torch.cat([part.tensors[0] for part in (one.train.data, one.val, one.test)])
    assert images.shape == (1797, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
