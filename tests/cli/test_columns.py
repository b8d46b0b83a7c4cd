"""What the commands print fits a terminal of 40, 80 and 140 columns, and is not cut where there is no terminal."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

from tests.helpers.processes import fork_python, once_per_module
from tests.helpers.project import USERS_FILE
from trainer.cli.columns import COMMANDS as TYPED
from trainer.cli.columns import fitted_text
from trainer.cli.main import COMMANDS

LAYERS = """
class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential()
        for number in range(3):
            self.layer.add_module(f"a_rather_long_name_of_block_{number}", torch.nn.Linear(2, 2))
        self.layer.add_module("last", torch.nn.Linear(2, 1))
"""
FIT = "fit --module mymodel.py:Deep --data mymodel.py:Data --trainer.max_epochs 1 --trainer.callbacks"
SHOWN = [
    f"{FIT} [{{class_path: ModelSummary, max_depth: 2}},ModelCheckpoint]",
    *([f"{FIT} [{{class_path: RichModelSummary, max_depth: 2}}]"] if find_spec("rich") else []),
    "runs ls runs",
    "runs ls runs --metric train_loss --sort -step",
    "checkpoint ls runs",
    "estimate --params 7e9",
    "estimate --params 7e9 --gpus 16 --memory 80G --sequence 8k --layers 32 --hidden 4096 --heads 32",
    "init --list",
    "config --list",
    "help ModelCheckpoint",
    "fit --module mymodel.py:Net --module.help",
    "checkpoint export --help",
    "--help",
    *(f"{name} --help" for name in COMMANDS),
]
SCREENS = """
import json, os, shlex, sys
from pathlib import Path
from tests.helpers.terminal import Terminal
from trainer.cli.main import main

commands = json.loads(sys.argv[1])
found = {}
own = os.dup(1), os.dup(2)
for columns in (40, 80, 140):
    for command in commands:
        terminal = Terminal(columns=columns)
        os.dup2(terminal.stream.fileno(), 1)
        os.dup2(terminal.stream.fileno(), 2)
        try:
            code = main(shlex.split(command.replace("[", "'[").replace("]", "]'")))
            sys.stdout.flush()
        finally:
            os.dup2(own[0], 1)
            os.dup2(own[1], 2)
        found[f"{columns} {command}"] = code, terminal.text()
Path("screens.json").write_text(json.dumps(found))
"""


def _screens() -> dict[str, tuple[int, str]]:
    Path("mymodel.py").write_text(USERS_FILE + LAYERS)
    Path("screens.py").write_text(SCREENS)
    fork_python("screens.py", json.dumps(SHOWN), env={"TERM": "xterm", "NO_COLOR": "1"}).wait().check()
    found: dict[str, tuple[int, str]] = json.loads(Path("screens.json").read_text())
    return found


screens = once_per_module(_screens)


def lines_of(text: str) -> list[str]:
    """Return all lines, also those that were covered by others later."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))


def test_no_line_is_wider_than_the_terminal(screens: dict[str, tuple[int, str]]) -> None:
    found = {}
    for name, (code, text) in screens.items():
        columns = int(name.partition(" ")[0])
        assert (code, "Traceback" in text) == (0, False), (name, text)
        wide = [line for line in lines_of(text) if len(line) > columns]
        # A path and a command stay in one piece.
        found[name] = [line for line in wide if not re.search(rf"^ *[^ ]+$|(^|  +)({'|'.join(TYPED)})", line)]
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_first_line_and_the_layers_of_a_run(screens: dict[str, tuple[int, str]]) -> None:
    command = SHOWN[0]
    heads = {}
    for columns in (40, 80, 140):
        lines = lines_of(screens[f"{columns} {command}"][1])
        heads[columns] = next(line.split() for line in lines if line.startswith("layer"))
        text = " ".join(" ".join(lines).split())
        assert "fit: cpu (" in text
        assert ", 1 process, strategy single_device, precision 32-true" in text
        assert "a_rather_long_name_of_block_2" in re.sub(r"[ \d,.-]*\n ", "", "\n".join(lines))
        assert re.search(r"^ *total +(Deep +)?21\b", "\n".join(lines), re.MULTILINE), lines
    assert heads[140] == ["layer", "type", "parameters", "trainable", "buffers", "MB"]
    assert heads[80] == ["layer", "type", "parameters", "trainable", "MB"]
    assert heads[40] == ["layer", "parameters"]
    assert "left out: type, trainable, buffers, MB" in screens[f"40 {command}"][1]


def test_columns_that_were_asked_for_stay(screens: dict[str, tuple[int, str]]) -> None:
    text = screens["40 runs ls runs --metric train_loss --sort -step"][1]
    head = lines_of(text)[0].split()
    assert {"name", "step", "train_loss"} <= set(head)
    assert "left out:" in text
    assert "--csv or --json" in " ".join(text.split())


def test_commands_stay_in_one_line() -> None:
    command = "trainer runs ls runs --filter 'val acc > 0.9' --sort -val_acc --hparam module.lr"
    for line in (command, f"  {command}", f"list them:    {command}"):
        assert fitted_text(line, 30) == line


def test_descriptions_stay_next_to_or_below_their_terms() -> None:
    line = "  --trainer.callbacks+=NAME           one more callback; without the +, the file's list is replaced"
    assert fitted_text(line, 80).split("\n") == [
        "  --trainer.callbacks+=NAME           one more callback; without the +, the",
        "                                      file's list is replaced",
    ]
    assert fitted_text(line, 40).split("\n") == [
        "  --trainer.callbacks+=NAME",
        "      one more callback; without the +,",
        "      the file's list is replaced",
    ]
