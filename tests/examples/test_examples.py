"""The examples do what their READMEs say: the commands are run, shortened, and their files are checked."""

from __future__ import annotations

import csv
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import ROOT, Result, Running, fork_python
from trainer.checkpoint.manifest import verify_checkpoint

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
    "trainer fit --config examples/text-classification": "--trainer.max_epochs 1",
    "trainer fit --config examples/bert": "--trainer.max_epochs 1 --trainer.limit_train_batches 3 --module.width 16",
    "trainer fit --config examples/vit": "--trainer.max_epochs 1 --trainer.limit_train_batches 3 --module.width 16",
    "trainer fit --config examples/causal-lm": "--trainer.max_steps 3 --trainer.val_check_interval 2 --data.length 32",
    "python examples/digits/train.py": "--max-epochs 1",
    "python examples/digits/own_callback.py": "",
    "python examples/digits/sweep_optuna.py": "--trials 2 --max-epochs 2",
    "python examples/gpt/sample.py": "--length 5",
    "python examples/gan/train.py": "--max-steps 3",
}
"""The beginning of a command: what makes it short. The longest one that fits is taken."""


def commands(section: str) -> list[str]:
    """Return the commands in the `bash` blocks below a heading of the README."""
    text = re.split(rf"^## {section}$", README.read_text(), flags=re.MULTILINE)[1]
    text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def shortened(command: str) -> list[str]:
    """Return the words after `python`, with options that shorten the run."""
    start = max((start for start in SHORTER if command.startswith(start)), key=len)
    words = shlex.split(f"{command} {SHORTER[start]}")
    return [*(["-m", "trainer"] if words[0] == "trainer" else []), *words[1:]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs a command of the README, shortened, in a directory with only the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run(command: str, short: bool = True) -> Result:
        words = shortened(command) if short else ["-m", *shlex.split(command)]
        return fork_python(*words, cwd=tmp_path).wait().check()

    return run


EXAMPLES = ["digits", "gpt", "gan", "text-classification", "bert", "vit", "causal-lm"]


def test_every_command_of_the_readme_is_run_below() -> None:
    headings = re.findall(r"^## (\S+)$", README.read_text(), flags=re.MULTILINE)
    assert [heading for heading in headings if commands(heading)] == EXAMPLES


def test_every_file_that_can_be_run_documents_its_command() -> None:
    for path in sorted((ROOT / "examples").rglob("*.py")):
        if "__main__" in path.read_text():
            assert re.search(rf"^(Run it with:|   ) python {path.name}", path.read_text(), flags=re.MULTILINE), path
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        assert re.search(rf"^# +trainer fit --config {path.name}$", path.read_text(), flags=re.MULTILINE), path


def test_digits(run: Callable[[str], Result]) -> None:
    outputs = [run(command).stdout for command in commands("digits")]
    assert "val_acc" in outputs[0]
    assert "test_acc" in outputs[1]
    # Two epochs of 3 steps, and one more of the same run.
    assert "after 6 steps" in outputs[0]
    assert "after 9 steps" in outputs[2]
    assert "after 6 steps" in outputs[3]
    assert "test accuracy: 0." in outputs[4]
    before, after = outputs[5].split("The same run, resumed")
    assert len(re.findall(r"epoch \d+: val_acc", before)) == 2
    # The state was restored: the second run has the epochs of the first one, too.
    assert re.findall(r"epoch .*", after)[:2] == re.findall(r"epoch .*", before)
    assert "val_acc reached 0.98" in after
    assert re.search(r"[12] trials complete, [01] pruned\nbest: val_acc 0\.", outputs[6])
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


def test_text_classification(run: Callable[[str], Result]) -> None:
    [command] = commands("text-classification")
    assert "val_acc" in run(command).stdout


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_models_of_transformers(name: str, run: Callable[[str], Result]) -> None:
    pytest.importorskip("transformers")
    [command] = commands(name)
    assert "val_acc" in run(command).stdout
    assert Path(f"runs/{name}/model/config.json").is_file()


SHARDED = {
    "bert": ("bert/config.yaml", "AutoModelForSequenceClassification"),
    "vit": ("vit/config.yaml", "AutoModelForImageClassification"),
    "causal-lm": ("causal-lm/config.yaml", "AutoModelForCausalLM"),
    "lora": ("causal-lm/lora.yaml", "AutoPeftModelForCausalLM"),
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", "deepspeed_stage_3"])
@pytest.mark.parametrize("name", SHARDED)
def test_models_of_transformers_on_two_processes(
    name: str, strategy: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one go and resumed: `from_pretrained` reads the same bits, without missing and unexpected keys."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # else PEFT asks the hub for a tokenizer
    package = pytest.importorskip("peft" if name == "lora" else "transformers")
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    config, kind = SHARDED[name]
    where = f"--trainer.devices 2 --trainer.strategy {strategy} --trainer.limit_val_batches 2 --data.batch_size 4"
    if "causal-lm" in config:
        where += " --data.length 32"
    if name == "lora":
        base = "--module.save_to base --trainer.max_steps 1"
        run(f"trainer fit --config examples/causal-lm/config.yaml {base} --data.length 32", short=False)
        where += " --module.folder base"
    for folder, steps in {"unbroken": (4,), "broken": (2, 4)}.items():
        for number, last in enumerate(steps):
            run(
                f"trainer fit --config examples/{config} {where} --module.save_to {folder} --trainer.max_steps {last} "
                f"--trainer.default_root_dir runs/{folder} {'--ckpt-path last' if number else ''}",
                short=False,
            )
    unbroken, broken = (getattr(package, kind).from_pretrained(folder) for folder in ("unbroken", "broken"))
    assert unbroken.state_dict().keys() == broken.state_dict().keys()
    for key, value in unbroken.state_dict().items():
        assert torch.equal(value, broken.state_dict()[key]), key
    if name != "lora":
        _, found = getattr(package, kind).from_pretrained("unbroken", output_loading_info=True)
        assert not any(found.values()), found


def test_causal_lm(run: Callable[[str], Result]) -> None:
    pytest.importorskip("peft")
    for command in commands("causal-lm"):
        assert "val_loss" in run(command).stdout
    assert Path("runs/causal-lm/llama/config.json").is_file()
    assert Path("runs/causal-lm/adapter/adapter_config.json").is_file()


def test_digits_learns(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-m", "trainer", "fit", "--config", "examples/digits/config.yaml"]
    text = Running(command, tmp_path, ENVIRONMENT).wait().check().stdout
    match = re.search(r"\bval_acc\s+(0\.\d+)", text)
    assert match is not None, text
    assert float(match[1]) > 0.97


def test_a_pruned_trial_of_optuna_ends_cleanly(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    words = ["examples/digits/sweep_optuna.py", "--max-epochs", "3", "--storage", "sqlite:///sweep.db"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for trials, seed in (("4", "1"), ("1", "2")):  # the second process goes on with the sweep of the first
        options = ("--trials", trials, "--seed", seed)
        done = Running([sys.executable, *words, *options], tmp_path, ENVIRONMENT).wait().check()
    complete, pruned = map(int, re.findall(r"(\d) trials complete, (\d) pruned", done.stdout)[0])
    assert complete + pruned == 5
    assert complete >= 2 <= 2 * pruned
    ends = {}
    for trial in range(5):
        folder = tmp_path / f"runs/optuna/trial-{trial}/version_0/checkpoints"
        (saved,) = (path for path in folder.iterdir() if path.is_dir())
        assert verify_checkpoint(saved) == []
        ends[trial] = saved.name
    assert len([name for name in ends.values() if "epoch=2" in name]) == complete  # the others ended earlier


def test_population_based_training_with_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason='needs Ray Tune: pip install "ray[tune]"')
    words = ["examples/digits/sweep_ray.py", "--population", "2", "--max-epochs", "4"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = Running([sys.executable, *words], tmp_path, ENVIRONMENT).wait().check().stdout
    results = [float(value) for value in re.findall(r"^epoch 3, lr .*: val_acc (\S+)$", text, flags=re.MULTILINE)]
    # The trial that began with 1e-7 goes on from the other one's checkpoint.
    assert len(results) == 2
    assert min(results) > 0.9
    assert list((tmp_path / "runs/ray/pbt").glob("*/checkpoint_*/checkpoint/manifest.json"))


def test_gpt_learns(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-m", "trainer", "fit", "--config", "examples/gpt/config.yaml"]
    text = Running([*command, "--trainer.max_steps", "250"], tmp_path, ENVIRONMENT).wait().check().stdout
    match = re.search(r"\bval_bits_per_byte\s+(\d\.\d+)", text)
    assert match is not None, text
    # 8 bits before training, 5.1 for a model that only knows how often each byte occurs.
    assert float(match[1]) < 4.2
