"""The command line takes what people type: either spelling, lists that grow, references, help on a class."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.processes import run_python
from tests.helpers.project import Command, assert_recorded, done, refused
from tests.helpers.terminal import Terminal
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.cli.completion import REPLACED, SECOND_WORDS, options_of
from trainer.cli.help import _classes, class_names
from trainer.cli.main import COMMANDS, main
from trainer.cli.options import CommandParser
from trainer.config.tree import KEYS
from trainer.errors import ConfigError
from trainer.settings import ARGUMENTS

TRAINED = """
class Trained(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Bare(TrainModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)

    val_dataloader = train_dataloader
"""
QUIET = ["--trainer.max_steps=2", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]


@pytest.fixture
def bare(project: Path) -> list[str]:
    with open(project / "mymodel.py", "a") as file:
        file.write(TRAINED)
    return ["--module", "mymodel.py:Bare", *QUIET]


def printed(command: Command, *arguments: str) -> dict:
    out, _ = done(command("fit", *arguments, "--print-config"))
    found: dict = yaml.safe_load(out)
    return found


def test_hyphens_and_underscores_are_alike(command: Command, bare: list[str]) -> None:
    found = printed(command, *bare, "--trainer.max-epochs", "3", "--trainer.callbacks.0.save-top-k=2", *_checkpoint())
    assert found["trainer"]["max_epochs"] == 3
    assert found["trainer"]["callbacks"][0]["init_args"]["save_top_k"] == 2
    assert command("estimate", "--params", "1000", "--num_nodes=2")[0] == 0
    assert "nothing was started" in command("fit", *bare, "--dry_run", "--world_size", "2")[1]


def _checkpoint() -> list[str]:
    return ["--trainer.callbacks", "[{class_path: ModelCheckpoint, every_n_epochs: 2}]"]


def test_a_list_grows_by_plus_and_a_replaced_one_is_reported(command: Command, project: Path, bare: list[str]) -> None:
    (project / "run.yaml").write_text("trainer:\n  callbacks: [ModelCheckpoint, LearningRateMonitor]\n")
    more = ["--trainer.callbacks+=Timer", "--trainer.callbacks+", "{class_path: ModelSummary, max_depth: 3}"]
    found = printed(command, "--config", "run.yaml", *bare, *more)
    summary = {"class_path": "ModelSummary", "init_args": {"max_depth": 3}}
    assert found["trainer"]["callbacks"] == ["ModelCheckpoint", "LearningRateMonitor", "Timer", summary]
    assert printed(command, *bare, "--trainer.callbacks+=Timer")["trainer"]["callbacks"] == ["Timer"]
    _, err = done(command("fit", "--config", "run.yaml", *bare, "--trainer.callbacks", "[Timer]", "--print-config"))
    assert "the list at run.yaml:2 (ModelCheckpoint, LearningRateMonitor). To keep it and add to it" in err
    assert "write --trainer.callbacks+=NAME" in err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${trainer.max_steps}", 2),
        ("${env:MY_WIDTH}", 7),
        ("${env:MY_OTHER_WIDTH, 9}", 9),
        ("${oc.env:MY_WIDTH}", 7),
        ("${env:MY_OTHER_WIDTH,${trainer.max_steps}}", 2),
        ("${env:MY_WIDTH, ${env:MY_OTHER_WIDTH,3}}", 7),
    ],
)
def test_references(
    command: Command, bare: list[str], value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_WIDTH", "7")
    assert printed(command, *bare, "--module.width", value)["module"]["init_args"]["width"] == expected


def test_references_within_texts_and_escaped_ones(command: Command, bare: list[str]) -> None:
    options = ["--trainer.default_root_dir", "runs/${trainer.max_steps}-$${x}"]
    found = printed(command, *bare, *options)
    assert found["trainer"]["default_root_dir"].endswith("runs/2-$${x}")
    Path("again.yaml").write_text(yaml.safe_dump(found))
    assert printed(command, "-c", "again.yaml") == found
    done(command("fit", "-c", "again.yaml", "--optimizer", "SGD", "--optimizer.lr", "0.1"))
    (saved,) = Path("runs").glob("*/version_0/config.yaml")
    assert saved.parent.parent.name == "2-${x}"
    assert yaml.safe_load(saved.read_text())["trainer"] == found["trainer"]


def test_a_module_without_configure_optimizers_gets_them_from_the_configuration(
    command: Command, project: Path, bare: list[str]
) -> None:
    refused(command, "fit", *bare)
    optimizer = ["--optimizer", "AdamW", "--optimizer.lr", "0.25"]
    scheduler = ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size=1", "--lr_scheduler.interval=step"]
    monitor = [
        "--trainer.logger=CSVLogger",
        "--trainer.callbacks+=LearningRateMonitor",
        "--trainer.log_every_n_steps=1",
    ]
    done(command("fit", *bare, *optimizer, *scheduler, *monitor))
    run = next(project.glob("runs/*"))
    rates = (run / "metrics.csv").read_text()
    assert "0.25" in rates
    assert "0.025" in rates
    done(command("fit", "--config", str(run / "config.yaml"), "--print-config"))


HELP = {
    "help fit": "usage: trainer fit --config",
    "help fsdp": "sharding_strategy: ",
    "help FSDPStrategy": "or --trainer.strategy.NAME",
    "help trainer.callbacks.CSVLogger": "or --trainer.logger.N.NAME",
    "help ProgressBar": "or --trainer.callbacks.N.NAME",
    "help bf16-mixed": "precision bf16-mixed: weights in float32, the forward in bfloat16",
    "help 16": "precision 16-mixed: ",
    "help AdamW": "weight_decay: a number (default: 0.01)",
    "help mymodel.py:Bare": "or --module.NAME",
    "fit --module mymodel.py:Bare --module.help": "Bare\n\narguments",  # not what its base says
    "fit --module mymodel.py:Bare --module.nonsense=1 --module.help": "width: an integer (default: 2)",
    "help torch.optim.SGD": "or --optimizer.NAME",
    "help checkpoint export": "--expand-tied",
    "version": "trainer 0.",
    "-V": "trainer 0.",
}


@pytest.mark.parametrize("line", HELP)
def test_help_on_anything(command: Command, bare: list[str], line: str) -> None:
    out, _ = done(command(*line.split()))
    assert HELP[line] in out


def test_untrained_weights_are_reported(command: Command, bare: list[str]) -> None:
    _, err = done(command("validate", "--module", "mymodel.py:Bare", "--trainer.logger=false"))
    assert "note: no --ckpt-path was given: the weights are those that the module begins with" in err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--trainer.max_epoch=1"], 2, "trainer has no argument 'max_epoch'"),
        ([], 2, "Bare has no configure_optimizers"),
        (["--optimizer", "SGD", "--ckpt-path", "best"], 1, "--ckpt-path best: no such checkpoint"),
    ],
)
def test_traceback_is_shown_where_asked_for(
    command: Command, bare: list[str], options: list[str], code: int, words: str
) -> None:
    plain, asked = (command("fit", *bare, *options, *more) for more in ((), ("--traceback",)))
    assert (plain[0], asked[0]) == (code, code)
    assert "Traceback" not in plain[2]
    assert "Traceback (most recent call last)" in asked[2]
    assert words in asked[2]


@pytest.mark.parametrize("where", ["in the constructor", "in the import"])
def test_the_traceback_is_that_of_the_users_code(command: Command, bare: list[str], where: str) -> None:
    lines = (
        "from trainer import TrainModule\n\n\nclass Fails(TrainModule):\n    def __init__(self):\n        {}['width']\n"
    )
    Path("fails.py").write_text(lines if where == "in the constructor" else "{}['width']\n")
    plain, asked = (command("fit", "--module", "fails.py:Fails", *more) for more in ((), ("--traceback",)))
    assert (plain[0], asked[0]) == (2, 2)
    assert "Traceback" not in plain[2]
    assert "{}['width']\n" in asked[2]
    assert "fails.py" in asked[2].split("{}['width']")[0]
    Path("second.py").write_text("import no_such_package_of_ours\n")
    _, _, err = command("fit", "--module", "fails.py:Fails", "--data", "second.py:Data", "--traceback")
    assert "import no_such_package_of_ours\n" in err


def test_commands_to_type_quote_their_paths(command: Command, bare: list[str]) -> None:
    pytest.importorskip("tensorboard")
    folder = "a b & c"
    options = ["--optimizer", "SGD", "--trainer.default_root_dir", folder, "--trainer.logger", "TensorBoardLogger"]
    out, _ = done(command("fit", *bare, *options))
    commands = [line.partition(":")[2] for line in out.splitlines() if line.startswith(("validate it", "TensorBoard"))]
    typed = [shlex.split(line) for line in commands]
    assert [words[:3] for words in typed] == [
        ["tensorboard", "--logdir", f"{folder}/version_0"],
        ["trainer", "validate", "--config"],
    ]
    assert main(typed[1][1:]) == 0
    (Path(folder) / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    _, out, _ = command("config", "--from", f"{folder}/zero.json", "--output", f"{folder}/run.yaml")
    assert shlex.split(out.splitlines()[-1])[-1] == f"{folder}/run.yaml"


def test_a_reader_that_leaves_early_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -m trainer schema | head -c 10"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert len(ended.stdout) == 10
    assert ended.stderr == ""


CannotWrite = Callable[..., tuple[int, str]]


@pytest.fixture
def cannot_write(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], _as_before: None) -> CannotWrite:
    """Run a command whose output is a full disk; return the exit code and stderr."""

    def run(words: list[str], unbuffered: bool = False, path: str = "/dev/full") -> tuple[int, str]:
        capsys.readouterr()
        binary = open(path, "wb", buffering=0 if unbuffered else -1)  # noqa: SIM115
        with monkeypatch.context() as patch, io.TextIOWrapper(binary, write_through=unbuffered) as stream:
            patch.setattr(sys, "stdout", stream)
            code = main(words)
        return code, capsys.readouterr().err

    return run


NOT_WRITTEN = "error: the output could not be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "words", ["help", "--version", "env", "schema", "completion bash", "fit --help", "estimate -h"]
)
def test_output_that_cannot_be_written_is_an_error_in_words(
    words: str, unbuffered: bool, cannot_write: CannotWrite
) -> None:
    assert cannot_write(words.split(), unbuffered) == (1, NOT_WRITTEN)


@pytest.mark.parametrize("bar", [True, False])
def test_a_training_goes_on_without_output_and_says_so_at_its_end(
    bar: bool, cannot_write: CannotWrite, project: Path
) -> None:
    words = ["fit", "--module", "mymodel.py:Net", "--data", "mymodel.py:Data", "--trainer.max_steps", "2"]
    code, err = cannot_write([*words, f"--trainer.enable_progress_bar={bar}", "--trainer.accelerator", "cpu"])
    assert code == 1
    assert err.endswith(NOT_WRITTEN)
    assert CheckpointDirectory(project / "runs" / "version_0" / "checkpoints").resolve("last").name == "epoch=0-step=2"
    for reading in (["runs", "ls", "runs"], ["checkpoint", "ls", "runs"], ["checkpoint", "show", "runs"]):
        assert cannot_write(reading) == (1, NOT_WRITTEN)


@pytest.mark.parametrize("code", [75, 143, 2])
def test_a_stop_keeps_its_exit_code_without_output(
    code: int, cannot_write: CannotWrite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: list[str]) -> int:
        print("stopped")
        raise SystemExit(code)

    monkeypatch.setattr(importlib.import_module("trainer.cli.help"), "run", run)
    with pytest.raises(SystemExit) as end:
        cannot_write(["help"])
    assert end.value.code == code


@pytest.mark.parametrize(
    "error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.ENOSPC, "No space left on device")]
)
@pytest.mark.parametrize("unbuffered", [False, True])
def test_an_error_of_the_users_own_output_is_not_taken_for_the_commands(
    error: OSError, unbuffered: bool, cannot_write: CannotWrite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(importlib.import_module("trainer.cli.help"), "run", run)
    with pytest.raises(OSError, match=error.strerror) as raised:
        cannot_write(["help"], unbuffered, os.devnull)
    assert raised.value is error


def test_output_that_is_closed_ends_nothing() -> None:
    for closed in (">&-", ">&- 2>&-", "2>&-"):
        command = f"{sys.executable} -m trainer help {closed}"
        ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, ""), closed


def test_the_schema_takes_what_the_command_takes(command: Command) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    out, _ = done(command("schema"))
    validator.check_schema(json.loads(out))
    check = validator(json.loads(out))
    examples = Path(__file__).parents[2] / "examples"
    for file in examples.glob("*/config.yaml"):
        assert not [*check.iter_errors(yaml.safe_load(file.read_text()))], file
    wrong = [
        {"trainer": {"max_epoch": 3}},
        {"trainer": {"max_epochs": "three"}},
        {"trainer": {"callbacks": [{"class_path": "Timer", "init_args": {"durations": 3}}]}},
        {"modul": "x.py:Y"},
        {"trainer": {"precision": "bf17"}},
        {"trainer": {"strategy": {"class_path": "ddp", "static_grap": True}}},
        {"trainer": {"callbacks": [{"class_path": "EarlyStopping", "monitr": "val_loss"}]}},
        {"optimizer": {"class_path": "AdamW", "learning_rate": 0.1}},
    ]
    assert [not check.is_valid(configuration) for configuration in wrong] == [True] * len(wrong)
    right = {
        "trainer": {
            "precision": 16,
            "strategy": {"class_path": "ddp", "static_graph": True},
            "callbacks": [{"class_path": "EarlyStopping", "monitor": "val_loss"}, {"class_path": "x.py:Y", "a": 3}],
        },
        "optimizer": {"class_path": "AdamW", "lr": "${module.lr}"},
        "lr_scheduler": {"class_path": "StepLR", "step_size": 3, "interval": "step"},
    }
    assert check.is_valid(right)
    assert check.is_valid({"trainer": {"precision": "${env:PRECISION}"}})
    assert check.is_valid({"trainer": {"strategy": {"class_path": "ddp"}, "profiler": {"class_path": "x.py:Y"}}})
    warm_up = {"class_path": "LambdaLR", "lr_lambda": "x.py:warm_up"}
    assert check.is_valid({"lr_scheduler": {"class_path": "ChainedScheduler", "schedulers": [warm_up]}})
    keys: list[tuple[str, ...]] = [*((key,) for key in KEYS), *(("trainer", name) for name in ARGUMENTS)]
    for key in keys:
        written: dict = {"module": "mymodel.py:Net"}
        (written if len(key) == 1 else written.setdefault("trainer", {}))[key[-1]] = None
        Path("run.yaml").write_text(yaml.safe_dump(written))
        if command("fit", "--config", "run.yaml", "--print-config")[0] == 0:
            assert check.is_valid(written), key


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(command: Command, tmp_path: Path, shell: str) -> None:
    out, _ = done(command("completion", shell))
    assert all(name in out for name in COMMANDS)
    assert "trainer.max_epochs" in out
    assert all(words in out for words in REPLACED[shell].values())
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: the script is not run")
    (tmp_path / "script").write_text(out)
    for name in ("train.py", "settings.yaml", "ckpt1"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    completed = {
        "fit --trainer.max_e": "--trainer.max_epochs",
        "checkpoint ex": "export",
        "checkpoint export --max": "--max-shard-size",
        "tune b": "batch-size",
        "tune lr --max": "--max-lr",
        "help est": "estimate",
        "help ModelC": "ModelCheckpoint",
        "fit --trainer.strategy fs": "fsdp",
        "validate --trainer.precision bf16-m": "bf16-mixed",
        "init --template vi": "vit",
        "fit --ckpt-path sc": "script",
        "fit --optimizer AdamW": "AdamW",
        "fit --lr_scheduler Step": "StepLR",
        "fit --trainer.callbacks ModelC": "ModelCheckpoint",
        "fit --trainer.logger CSV": "CSVLogger",
        "config --preset zero3-": "zero3-offload",
        "launch --nproc-per-node 2 trainer vali": "validate",
        "launch trainer fit --trainer.max_e": "--trainer.max_epochs",
        "launch trainer fit --trainer.strategy fs": "fsdp",
    }
    typed, found = list(completed), list(completed.values())
    if shell == "fish":
        words = "".join(f"complete -C 'trainer {line}';" for line in typed)
        ended = subprocess.run(["fish", "-c", f"source script; {words}"], cwd=tmp_path, capture_output=True, text=True)
        offered = [line.split("\t")[0] for line in ended.stdout.splitlines()]  # a tab is before what they are
        assert (offered, ended.stderr) == (found, "")
    if shell == "bash":
        assert _bash_completes([*typed, *FILES], tmp_path) == [*found, *FILES.values()]


FILES = {
    "checkpoint export ck": "ckpt1",
    "checkpoint export ckpt1 ru": "runs/",
    "checkpoint export --dtype bfloat16 ck": "ckpt1",
    "checkpoint export --force --ex": "--expand-tied",
    "fit --config set": "settings.yaml",
    "fit --config=set": "--config=settings.yaml",
    "fit --dry-run --trainer.max_e": "--trainer.max_epochs",
    "fit --ckpt-path la": "last",
    "test --ckpt-path be": "best",
    "test --ckpt-path ck": "ckpt1",
    "test --ckpt-path ru": "runs/",
    "fit --optimizer tra": "train.py",
    "runs ls ru": "runs/",
    "migrate ru": "runs/",
    "config set": "settings.yaml",
    "config resolve set": "settings.yaml",
    "estimate set": "settings.yaml",
    "tune lr set": "settings.yaml",
    "launch tra": "train.py",
    "launch ./tr": "./train.py",
    "launch --devices 2 train.": "train.py",
    "launch --nproc 2 python tr": "train.py",
    "launch --standalone --nno": "--nnodes",
    "launch -- tra": "train.py",
    "launch -- trainer fi": "fit",
    "launch -- trainer fit --trainer.max_e": "--trainer.max_epochs",
    "launch trainer fit --config set": "settings.yaml",
    "launch trainer fit --ckpt-path la": "last",
}
"""What a bash makes of lines with files, flags, or a program after `launch`."""


def _bash_completes(lines: list[str], folder: Path) -> list[str]:
    """Type lines, each with a Tab, into a bash that has read `script`; return the last word of what then runs."""
    (folder / "rc").write_text('. ./script\ntrainer() { printf "ran:%s\\n" "${!#}"; }\n')
    terminal = Terminal()
    terminal.type("".join(f"trainer {line}\t\n" for line in lines) + "exit\n")
    subprocess.run(
        ["bash", "--noprofile", "--rcfile", "rc", "-i"],
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "HOME": str(folder)},  # so the history of whoever runs this is kept
        stdin=terminal.stream,
        stdout=terminal.stream,
        stderr=terminal.stream,
        timeout=100,
    )
    return re.findall(r"^ran:(.*)\r$", terminal.text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict", "tune"])
def test_shells_offer_no_option_that_a_run_refuses(command: Command, name: str) -> None:
    for word in SECOND_WORDS.get(name, [""]):
        for option in options_of(name, word):
            _, _, err = command(name, *filter(None, [word]), option)
            assert not any(words in err for words in ("unknown option", "has no argument")), (option, err)


@pytest.mark.parametrize("name", ["checkpoint", "runs", "config", "doctor", "estimate", "init", "launch"])
def test_shells_offer_the_options_of_a_command(command: Command, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {word: options_of(name, word) for word in SECOND_WORDS.get(name, [""])}
    made: list[Any] = []

    def parse(parser: Any, arguments: list[str]) -> None:
        made.append(parser)
        raise ConfigError("not parsed")

    monkeypatch.setattr(CommandParser, "parse", parse)
    monkeypatch.setattr(CommandParser, "parse_known_args", parse)
    command(name, "--config", "x.py")
    (parser,) = made
    subparsers = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for word, options in offered.items():
        of_word = subparsers[0][word] if word else parser
        taken = {option for action in of_word._actions for option in action.option_strings if option.startswith("--")}
        assert [*options] == sorted(option for option in taken if option.replace("_", "-") not in taken - {option})


def test_the_names_of_classes_are_known_without_torch() -> None:
    assert set(class_names()) == set(_classes())


def test_a_typo_is_answered_without_torch(project: Path) -> None:
    files = ("trainer: {max_epoch: 3}", "modul: x.py:X", "lr_scheduler: StepLR", "")
    for number, text in enumerate(files):
        Path(f"{number}.yaml").write_text(f"module: x.py:X\n{text}\n" if text[:5] != "modul" else text)
    Path("x.py").write_text("import torch\n")
    lines = [
        *("fit --module x.py:X --trainer.max_epoch 3", "fit --config 3.yaml --max_epochs 3"),
        *("fit --config 0.yaml", "fit --config 1.yaml", "fit --config 2.yaml", "fit --config 33.yaml --module.help"),
        *("validate --config 3.yaml --max_epochs 3", "tune lr --config 3.yaml 33.yaml"),
        *("estimate --config 3.yaml --trainer.max_epoch 3", "estimate --config 33.yaml"),
        *("doctor --config 3.yaml --trainer.max_epoch 3", "doctor --config 33.yaml"),
        *("fit --dry-run --config 3.yaml --trainer.max_epoch 3", "fit --dry-run --config 33.yaml"),
        *("checkpoint show nowhere", "config --from nowhere.json --output new.yaml"),
        "help modelcheckpoint",
    ]
    code = "import sys\nsys.modules['torch'] = None\nfrom trainer.__main__ import main\n"
    ended = run_python(f"{code}[main(line.split()) for line in {lines}]")
    assert ended.stderr.count("error: ") == len(lines), ended.stderr
    assert_recorded(ended.stderr)
