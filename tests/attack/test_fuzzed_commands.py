"""Command lines of drawn options and values do their work, or are refused with a message, with a known exit code."""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers.drawn_values import TEXTS
from tests.helpers.fuzzing import ACCEPTED, REFUSED, WrongError, called, try_each
from tests.helpers.project import USERS_FILE
from tests.tiers import Inputs
from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.main import COMMANDS
from trainer.settings import ARGUMENTS

CONFIG = """\
module: mymodel.py:Net
data: mymodel.py:Data
trainer: {max_steps: 2, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""
SCRIPT = "import sys\nprint(sys.argv)\n"
CHECKPOINT = "runs/version_0/checkpoints/epoch=0-step=1"
VALUES = (
    *(text for text in TEXTS if isinstance(text, str) and "\0" not in text),
    *("3", "0", "2.5", "1e999", "true", "null", "[1", "[1, 2]", "{a: 1}", "- x", ": ", "*a", "!!python/name:os.system"),
    *("run.yaml", "mymodel.py:Net", "script.py", "nothing.yaml", ".", "..", "/dev/null", "last", "best", CHECKPOINT),
    *("runs", "runs/version_0", "ddp", "fsdp", "bf16-mixed", "7e9", "7B", "-", "--", "--json", "--help", "-x", "a=b"),
    *("localhost:0", "x:y", "out", "digits", "zero2", "AdamW", "\udcff", "=", "=x", "'", '"', "{", "}", "%"),
    *("%s", "@run.yaml"),
    *('{"a": 1}', '["EarlyStopping"]', '{"class_path": "mymodel.py:Net"}', "{class_path: mymodel.py:Net, lr: 1}"),
    *('"3"', "1e3"),
    *("[[[[1]]]]", "[" * 500, "{" * 500, "&a [*a]", "<<: 1", "9" * 5000, "x" * 50_000, "! x", "? a", "---", "|", "> x"),
    *("2030-01-01", "12:00:00", "0o17", "0x1f", "1_000", "-1", "+1", ".5", "-.inf", ".nan", "~", "yes", "on"),
    *("~/x", "$HOME"),
    *("pipe", "folder", "zeros", "folder/nothing", "run.yaml/x", "builtins.object", "sys.exit", "mymodel.py:"),
    *(":", "..x"),
)
NAMES = (
    *("a", "a.b.c", "trainer", "trainer.", ".trainer", "trainer..x", ".", "..", "trainer.x"),
    *("trainer.Max_Steps", "module"),
    *("trainer.max-steps", "module.", "module.lr.x", "module.sizes.0", "module.layers.width", "module.steps.1", "data"),
    *(
        "trainer.callbacks",
        "trainer.callbacks.0",
        "trainer.callbacks.0.patience",
        "trainer.callbacks.-1",
        "trainer.logger.0",
    ),
    *(
        "trainer.callbacks." + "9" * 5000,
        "module." + "x." * 3000 + "x",
        "trainer.strategy.name",
        "trainer.strategy.x",
        "seed",
    ),
    *("module.class_path", "module.init_args", "module.init_args.lr", "data.init_args.batch_size"),
    *("ckpt_path", "x" * 50_000),
    *("module.\udcff", "module.ä", "module.'", "module.lr ", "trainer.callbacks.٣"),
    *("trainer.max_steps.0", "allow_changes.0"),
)
"""Of dotted options, right and wrong ones."""
RIGHT: dict[str, list[list[str]]] = {
    "fit": [["--config", "run.yaml"]],
    "validate": [["--config", "run.yaml"]],
    "test": [["--config", "run.yaml"]],
    "predict": [["--config", "run.yaml"]],
    "estimate": [
        ["--params", "7e9"],
        ["--config", "run.yaml"],
        [
            *("--params", "7e9", "--layers", "32", "--hidden", "4096", "--heads", "32", "--sequence", "4k", "--gpus"),
            *("8", "--memory", "80G"),
        ],
    ],
    "config": [["--preset", "cpu"], ["--list"]],
    "init": [["--template", "digits", "new"], ["--list"]],
    "launch": [["--slurm", "--print", "script.py"]],
    "env": [["--json"]],
    "checkpoint": [["ls", "runs"], ["show", CHECKPOINT], ["verify", "runs/version_0"], ["export", "runs", "out"]],
    "doctor": [["--devices", "1", "--timeout", "60"]],
    "tune": [["lr", "--config", "run.yaml", "--num-training", "3"]],
    "runs": [["ls", "runs"], ["ls", ".", "--json"]],
    "plot": [["runs"]],
    "migrate": [["mymodel.py"], ["."]],
    "schema": [[]],
    "completion": [["bash"], ["fish"]],
    "help": [["fit"], ["ModelCheckpoint"]],
}
NOT_TRIED = ("--slurm", "--ray", "--nnodes", "--rdzv", "--traceback")
"""Options whose work waits for other machines (--slurm is always given to launch, with --print), and the one that
asks for a traceback."""
CODES = {0, 1, 2}


def options_in_help(*command: str) -> list[str]:
    """Return the options that the help of a command names."""
    try:
        _, out, _ = called(*command, "--help")
    except SystemExit:
        return []
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", out)))


def drawn_line(rng: random.Random) -> list[str]:
    """Return a command line: one that is right, with options added, and sometimes words removed or exchanged."""
    command = rng.choice(list(RIGHT))
    line = [command, *rng.choice(RIGHT[command])]
    options = [one for one in options_in_help(*line[:1]) if not one.startswith(NOT_TRIED)]
    if command in ("fit", "validate", "test", "predict", "estimate"):
        options += [f"--trainer.{name}" for name in rng.sample(ARGUMENTS, 6)] + ["--module.lr", "--data.batch_size"]
    more: list[str] = []
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        option, value = rng.choice(options or ["--json"]), rng.choice(VALUES)
        if rng.random() < 0.2:
            option = odd_option(rng, option)
        more += rng.choice([[option, value], [option, value], [f"{option}={value}"], [option], [value], [f"{option}="]])
    if rng.random() < 0.1:
        more += rng.choice([more, more * 50, ["--", *more], ["--config", rng.choice(VALUES), *more]])
    if command == "launch":
        return [*line[:3], *more, *line[3:]]
    line += more
    if rng.random() < 0.3 and len(line) > 1:
        at = rng.randrange(1, len(line))
        line[at : at + 1] = rng.choice([[], [rng.choice(VALUES)], [line[at], line[at]]])
    return line


def odd_option(rng: random.Random, option: str) -> str:
    """Return an option of another form: shortened, in other letters, dotted."""
    ways = [option[: rng.randint(1, len(option))], option.upper(), option[1:], f"-{option}", option.replace("-", "_")]
    return rng.choice([*ways, f"{option}.x", f"--no-{option[2:]}", *[f"--{name}" for name in rng.choices(NAMES, k=6)]])


def command_line(rng: random.Random) -> str:
    """Try one command line."""
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("zeros").write_bytes(bytes(3000))
    Path("mymodel.py").write_text(USERS_FILE.replace("=self.batch_size)", "=max(1, self.batch_size))"))
    Path("run.yaml").write_text(CONFIG)
    Path("script.py").write_text(SCRIPT)
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}, "optimizers": [], "progress": {"step": 1}}
    write_checkpoint(Path(CHECKPOINT), state, info={"step": 1})
    line = drawn_line(rng)
    sys.argv = ["trainer", *line]
    try:
        code, _, error = called(*line)
    except SystemExit as exit_:
        code, error = exit_.code if isinstance(exit_.code, int) else 1, ""
    except BaseException as error:
        raise RuntimeError(f"trainer {short(line)}") from error
    problem = ""
    if code not in CODES:
        problem = "an exit code that no page names"
    elif "Traceback" in error:
        problem = "a traceback"
    elif code == 2 and "error: " not in error and "usage: " not in error:
        problem = "refused without a word"
    elif len(error) > 20_000:
        problem = f"an error of {len(error)} characters"
    elif "\x1b" in error:
        problem = "characters that control the terminal"
    if problem:
        raise WrongError(f"trainer {short(line)}\n{problem}, exit code {code}: {error[-2500:]}")
    return ACCEPTED if code == 0 else REFUSED


def short(line: list[str]) -> list[str]:
    """Return a command line as a message shows it."""
    return [word if len(word) < 300 else f"{word[:300]}..." for word in line]


def test_every_command_is_tried() -> None:
    assert set(RIGHT) == set(COMMANDS) - {"run-as-lightning"}  # which replaces this process by the program


def test_command_lines(inputs: Inputs) -> None:
    try_each(inputs, command_line)
