"""Errors of the command say where the problem is, what was given, what is allowed, and what to type."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.processes import run_python
from tests.helpers.project import Command
from tests.tiers import Inputs
from trainer.cli.main import COMMANDS

NET = "module: mymodel.py:Net\n"
KEYS = "Top-level keys: module, data, trainer, optimizer, lr_scheduler, ckpt_path, allow_changes, weights, name, vars."


def net(*arguments: str) -> str:
    """Return the configuration of a Net with these arguments, from line 4 on."""
    lines = ["module:", "  class_path: mymodel.py:Net", "  init_args:", *(f"    {argument}" for argument in arguments)]
    return "\n".join(lines) + "\n"


def callbacks(*items: str) -> str:
    """Return the configuration of a Net with these callbacks, from line 4 on."""
    return NET + "trainer:\n  callbacks:\n" + "".join(f"  - {item}\n" for item in items)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_long_word_is_shortened_in_the_error(command: Command, name: str) -> None:
    _, out, err = command(*filter(None, [name, "x" * 50_000]))
    assert len(out) + len(err) < 3000


VALUES = (None, True, 0, 3, -1, 2.5, "", "x", "auto", "mymodel.py:Net", "mymodel.py:Nothing", "torch.nn.Linear", [], {})


def mutated(rng: random.Random, tree: Any) -> Any:
    """Return the tree with one mistake at a place drawn at random."""
    if isinstance(tree, (dict, list)) and tree and rng.random() < 0.8:
        key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        changed: Any = tree.copy()
        how = rng.choice(["deeper", "deeper", "deeper", "without", "misspelt"])
        if how == "deeper":
            changed[key] = mutated(rng, tree[key])
        else:
            value = changed.pop(key)
            if how == "misspelt" and isinstance(changed, dict):
                changed[str(key)[:-1]] = value
        return changed
    return rng.choice([*VALUES, [tree], {"x": tree}, str(tree)])


def test_a_file_with_mistakes_drawn_at_random_is_taken_or_refused_by_its_name(inputs: Inputs, command: Command) -> None:
    callbacks = [{"class_path": "EarlyStopping", "init_args": {"monitor": "loss", "patience": 3}}]
    right = {
        "module": {"class_path": "mymodel.py:Net", "init_args": {"lr": 0.1}},
        "data": {"class_path": "mymodel.py:Data", "init_args": {"batch_size": 4}},
        "trainer": {"max_epochs": 1, "precision": "32-true", "accelerator": "cpu", "callbacks": callbacks},
    }
    for rng in inputs:
        tree = right
        for _ in range(rng.randint(1, 3)):
            tree = mutated(rng, tree)
        Path("drawn.yaml").write_text(yaml.safe_dump(tree))
        code, _, error = command("fit", "--config", "drawn.yaml", "--dry-run")
        assert code == 0 or (code == 2 and error.startswith("error: ")), (rng, tree, error)
        assert "Traceback" not in error, (rng, tree)


ONE = {
    # a key that does not exist, at each depth
    "top": (NET + "modul: x\n", "2", [f"unknown key 'modul'. Did you mean 'module'? {KEYS}"]),
    "top setting": (NET + "seed: 3\n", "2", ["unknown key 'seed'. Write it under trainer: (--trainer.seed)."]),
    "trainer": (
        NET + "trainer:\n  max_epocs: 3\n",
        "3",
        ["trainer has no argument 'max_epocs'. Did you mean 'max_epochs'?"],
    ),
    "module": (net("lrr: 3"), "4", ["module (Net) has no argument 'lrr'. Did you mean 'lr'?"]),
    "data": (
        NET + "data:\n  class_path: mymodel.py:Data\n  init_args:\n    bs: 3\n",
        "5",
        ["data (Data) has no argument 'bs'. It takes: batch_size."],
    ),
    "init_args": (
        "module:\n  class_path: mymodel.py:Net\n  init_arg: {}\n",
        "3",
        ["module (Net) has no argument 'init_arg'. Did you mean 'init_args'?"],
    ),
    "callback": (
        callbacks("{class_path: mymodel.py:Watcher, init_args: {patince: 3}}"),
        "4",
        ["trainer.callbacks.0 (Watcher) has no argument 'patince'. Did you mean 'patience'?"],
    ),
    "strategy": (
        NET + "trainer:\n  strategy:\n    class_path: ddp\n    find_unused: true\n",
        "5",
        ["trainer.strategy (DDPStrategy) has no argument 'find_unused'. Did you mean 'find_unused_parameters'?"],
    ),
    "nested object": (
        net("encoder: {class_path: mymodel.Encoder, init_args: {sise: 3}}"),
        "4",
        ["module.encoder (Encoder) has no argument 'sise'. Did you mean 'size'?"],
    ),
    "nested dataclass": (
        net("layers:", "  width: 3", "  dept: 3"),
        "6",
        ["module.layers (Layers) has no argument 'dept'. Did you mean 'depth'?"],
    ),
    "argument of Lightning": (
        NET + "trainer:\n  barebones: true\n",
        "3",
        ["trainer has no argument 'barebones'. Use logger=False, enable_progress_bar=False"],
    ),
    # a value of the wrong type
    "float for int": (
        NET + "trainer: {max_epochs: 2.5}\n",
        "2",
        ["trainer.max_epochs: given 2.5, allowed: an integer or null."],
    ),
    "text for int": (
        NET + "trainer:\n  max_epochs: '3'\n",
        "3",
        ['given "3", allowed: an integer or null.'],
    ),
    "bool for int": (
        NET + "trainer: {seed: true}\n",
        "2",
        ["trainer.seed: given true, allowed: an integer or null."],
    ),
    "yes for bool": (net("flag: yes"), "4", ['module.flag: given "yes", allowed: true or false.']),
    "null for text": (net("name: null"), "4", ["module.name: given null, allowed: text."]),
    "choice": (
        NET + "trainer: {gradient_clip_algorithm: nrm}\n",
        "2",
        ['given "nrm", allowed: "norm" or "value".'],
    ),
    "enum": (net("color: blue"), "4", ['module.color: given "blue", allowed: "red".']),
    "list item": (
        net("sizes:", "- 1", "- two"),
        "6",
        ['module.sizes.1: given "two", allowed: an integer.'],
    ),
    "mapping key": (net("steps: {a: 1}"), "4", ['module.steps.a: given "a", allowed: an integer.']),
    "list for int": (net("width: [1]"), "4", ["module.width: given [1], allowed: an integer."]),
    "trainer itself": (NET + "trainer: 3\n", "2", ["trainer: given 3, allowed: the trainer's arguments by name."]),
    "object": (callbacks("3"), "4", ["trainer.callbacks.0: given 3, allowed: a Callback (class_path and init_args)."]),
    "wrong object": (callbacks("mymodel.Net"), "4", ["Net is not derived from Callback (but from TrainModule)."]),
    "class of nested object": (
        net("kind: mymodel.Net"),
        "4",
        ["Net is not derived from Encoder (but from TrainModule)."],
    ),
    # names of tables, and what the trainer itself refuses
    "strategy name": (
        NET + "trainer:\n  strategy: dpd\n",
        "3",
        ["trainer: unknown strategy 'dpd'. Did you mean 'ddp'? Known: ", "single_device"],
    ),
    "precision name": (
        NET + "trainer:\n  precision: bf17\n",
        "3",
        ["trainer: unknown precision 'bf17'. Did you mean 'bf16'?", "bf16-mixed"],
    ),
    "callback name": (
        callbacks("EarlyStoping"),
        "4",
        ["trainer.callbacks.0: unknown Callback 'EarlyStoping'. Did you mean 'EarlyStopping'?", "package.module.Class"],
    ),
    "logger name": (
        NET + "trainer:\n  logger: CVSLogger\n",
        "3",
        ["trainer.logger: unknown Logger 'CVSLogger'. Did you mean 'CSVLogger'?"],
    ),
    "callback as key": (
        callbacks("EarlyStopping: {monitor: x}"),
        "4",
        ["allowed: 'class_path: package.module.Class' (or file.py:Class, or a short name)"],
    ),
    "callback's value": (
        callbacks("class_path: EarlyStopping\n    init_args:\n      monitor: x\n      patience: 0"),
        "7",
        ["trainer.callbacks.0: EarlyStopping(patience=0): give an integer from 1 up to 2,147,483,647."],
    ),
    "negative": (
        NET + "trainer:\n  seed: 1\n  max_steps: -7\n",
        "4",
        ["trainer: max_steps=-7: give a number from -1."],
    ),
    "contradiction": (
        NET + "trainer:\n  min_epochs: 5\n  max_epochs: 1\n",
        "3",
        ["trainer: min_epochs=5 is more than max_epochs=1."],
    ),
    "accelerator": (NET + "trainer:\n  accelerator: gup\n", "3", ["gup", "Did you mean 'gpu'?"]),
    "auto with arguments": (
        NET + "trainer:\n  strategy: {class_path: auto, timeout_seconds: 3}\n",
        "3",
        ["trainer.strategy: unknown Strategy 'auto'."],
    ),
    "checkpoint": (
        NET + "ckpt_path: lats\n",
        "2",
        ["there is no 'lats'. Did you mean 'last'? Allowed: last, best, or a checkpoint's folder."],
    ),
    # the class
    "no module": ("trainer: {max_epochs: 1}\n", "1", ["there is no module. Add 'module: package.module.Class'"]),
    "null module": ("module:\n", "1", ["there is no module."]),
    "number as module": ("module: 3\n", "1", ["module: given 3, allowed: 'class_path: package.module.Class'"]),
    "no class": ("module: {init_args: {lr: 1}}\n", "1", ["module: given {", "allowed: 'class_path:"]),
    "bare name": (
        "module: Net\n",
        "1",
        ["module: unknown TrainModule 'Net'. Or package.module.Class, or file.py"],
    ),
    "no file": ("module: mymodul.py:Net\n", "1", ["there is no file 'mymodul.py' in ", "Did you mean 'mymodel.py'?"]),
    "no class in file": (
        "module: mymodel.py:Ne\n",
        "1",
        ["mymodel.py has no class 'Ne'. Did you mean 'Net'? It has: Abstract, Failing, Needy, Net, Open."],
    ),
    "no package": ("module: nopackage.Net\n", "1", ["there is no module 'nopackage' in the environment and "]),
    "no module in package": (
        "module: trainer.modul.TrainModule\n",
        "1",
        ["there is no module 'modul' in trainer. Did you mean 'module'?"],
    ),
    "no folder": (
        "module: mymodel:Net\n",
        "1",
        ["there is no folder 'mymodel'. Write package.module.Class, or file.py"],
    ),
    "function": ("module: mymodel.py:make_net\n", "1", ["'make_net' is a function, not a class."]),
    "not a module": (
        "module: mymodel.py:Encoder\n",
        "1",
        ["module: Encoder is not derived from TrainModule (but from object)."],
    ),
    "data is no data": (NET + "data: mymodel.py:Net\n", "2", ["data: Net is not derived from DataModule"]),
    "missing arguments": (
        "module:\n  class_path: mymodel.py:Needy\n  init_args: {}\n",
        "2",
        [
            "module (Needy) needs the arguments 'lr', 'width': ",
            "give it in the file under init_args, or --module.lr VALUE.",
        ],
    ),
    "missing argument of a callback": (
        callbacks("EarlyStopping"),
        "4",
        ["trainer.callbacks.0 (EarlyStopping) needs the argument 'monitor'", "--trainer.callbacks.0.monitor VALUE"],
    ),
    "constructor raises": (
        "module: mymodel.py:Failing\n",
        "1",
        ["module: making Failing failed: ", "mymodel.py:101: ValueError: width 1 is too small"],
    ),
    # twice
    "key twice": (net("lr: 1", "width: 2", "lr: 2"), "6", ["key 'lr' is given twice, at lines 4 and 6. Keep one."]),
    "argument twice": (
        "module:\n  class_path: mymodel.py:Net\n  lr: 1\n  init_args: {lr: 2}\n",
        "3",
        ["module.lr is given twice: here, and under init_args at run.yaml:4. Keep one."],
    ),
    "init_args of no mapping": (
        "module:\n  class_path: mymodel.py:Net\n  init_args: 3\n",
        "3",
        ["module.init_args: given 3, allowed: arguments by name."],
    ),
}


@pytest.mark.parametrize("text_line_expected", ONE.values(), ids=ONE.keys())
def test_one_mistake_in_a_file(text_line_expected: tuple[str, str, list[str]], command: Command) -> None:
    text, line, expected = text_line_expected
    Path("run.yaml").write_text(text)
    code, out, err = command("fit", "--config", "run.yaml")
    assert code == 2
    assert out == ""
    assert err.startswith(f"error: run.yaml:{line}: ")
    for part in expected:
        assert part in err
    assert err.count("\n") <= 6


IMPORTS = {
    "import error": ("import os\nimport no_such_thing\n", "2: ModuleNotFoundError: No module named 'no_such_thing'"),
    "syntax error": ("x = 1\ndef f(:\n", "2: SyntaxError: invalid syntax"),
    "exception": ("def f():\n    raise RuntimeError('no\\nGPU')\nf()\n", "2: RuntimeError: no GPU"),
    "inside a library": ("import json\njson.loads('{')\n", "2: JSONDecodeError: "),
    "exit": ("import sys\nsys.exit('bye')\n", "2: SystemExit: bye"),
}


@pytest.mark.parametrize("written", ["bad.py:Net", "bad.Net"])
@pytest.mark.parametrize("text_and_error", IMPORTS.values(), ids=IMPORTS.keys())
def test_a_class_that_cannot_be_imported_shows_its_own_error(
    text_and_error: tuple[str, str], written: str, command: Command
) -> None:
    Path("bad.py").write_text(text_and_error[0])
    Path("run.yaml").write_text(f"module: {written}\n")
    code, _, err = command("fit", "--config", "run.yaml")
    assert code == 2
    assert err.startswith(
        f"error: run.yaml:1: module: importing bad failed: {Path.cwd() / 'bad.py'}:{text_and_error[1]}"
    )
    assert err.count("\n") == 1


def test_an_error_inside_an_imported_neighbour_names_the_neighbour(command: Command) -> None:
    Path("layers.py").write_text("\n\nimport no_such_thing\n")
    Path("good.py").write_text("from layers import X\n")
    _, _, err = command("fit", "--module", "good.Net")
    assert f"{Path.cwd() / 'layers.py'}:3: ModuleNotFoundError" in err


LINES = {
    "no command": ([], "usage: trainer COMMAND"),
    "unknown command": (["fti"], "error: unknown command 'fti'. Did you mean 'fit'? Commands: fit, validate, test,"),
    "option first": (["--verison"], "error: unknown command '--verison'. Commands: fit, validate"),
    "nothing": (["fit"], "error: nothing to fit: give a configuration, trainer fit --config run.yaml, or a module,"),
    "stray file": (["fit", "run.yaml"], "error: command line: unexpected 'run.yaml'. Write --config run.yaml, or"),
    "no value for config": (["fit", "--config"], "error: command line: argument -c/--config: expected at least one"),
    "empty checkpoint": (["fit", "--config", "run.yaml", "--ckpt_path="], "command line: ckpt_path: the text is empty"),
    "empty weights": (["fit", "--config", "run.yaml", "--weights", ""], "command line: weights: the text is empty"),
    "empty name": (["fit", "--config", "run.yaml", "--name="], "command line: name: the text is empty"),
    "unknown file": (["fit", "--config", "rum.yaml"], "error: rum.yaml: there is no such file in "),
    "folder": (["fit", "--config", "."], "error: .: there is no such file in "),
    "prefix of an option": (
        ["fit", "--config", "run.yaml", "--print-conf"],
        "error: command line: unknown option '--print-conf'. Did you mean '--print-config'? Those of the module",
    ),
    "setting without trainer": (
        ["fit", "--config", "run.yaml", "--max_epochs", "3"],
        "error: command line: unknown option '--max-epochs'. Did you mean '--trainer.max_epochs'?",
    ),
    "argument without module": (
        ["fit", "--config", "run.yaml", "--lr=3"],
        "Those of the module are written --module.NAME.\n",
    ),
    "prefix of a setting": (
        ["fit", "--config", "run.yaml", "--trainer.max_epoch", "3"],
        "error: command line: trainer has no argument 'max_epoch'. Did you mean 'max_epochs'?\n",
    ),
    "unknown root": (
        ["fit", "--config", "run.yaml", "--trianer.max_epochs", "3"],
        "error: command line: unknown key 'trianer'. Did you mean 'trainer'?",
    ),
    "two dots": (
        ["fit", "--config", "run.yaml", "--trainer..seed", "3"],
        "error: command line: --trainer..seed is not a name",
    ),
    "no value": (
        ["fit", "--config", "run.yaml", "--trainer.fast_dev_run"],
        "error: command line: --trainer.fast_dev_run needs a value: --trainer.fast_dev_run VALUE.\n",
    ),
    "no value before an option": (
        ["fit", "--config", "run.yaml", "--trainer.seed", "--print-config"],
        "error: command line: --trainer.seed needs a value",
    ),
    "not YAML": (
        ["fit", "--config", "run.yaml", "--module.sizes", "[1"],
        "error: command line: --module.sizes '[1': not valid YAML: while parsing a flow sequence expected",
    ),
    "wrong type": (
        ["fit", "--config", "run.yaml", "--seed", "x"],
        'error: command line: trainer.seed: given "x", allowed: an integer or null.\n',
    ),
    "index": (
        ["fit", "--config", "run.yaml", "--trainer.callbacks.1.patience", "3"],
        "trainer.callbacks.1: there is no such element; the list of the files has 1, numbered from 0.\n",
    ),
    "index into nothing": (
        ["fit", "--config", "run.yaml", "--trainer.logger.0.save_dir", "x"],
        "trainer.logger.0: there is no such element; the list of the files has 0, numbered from 0.",
    ),
    "class": (
        ["fit", "--config", "run.yaml", "--module", "mymodel.py:Nett"],
        "has no class 'Nett'. Did you mean 'Net'?",
    ),
    "data that is not there": (
        ["fit", "--config", "run.yaml", "--data.batch_size", "3"],
        "error: command line: data: given {",
    ),
}


@pytest.mark.parametrize("arguments_expected", LINES.values(), ids=LINES.keys())
def test_one_mistake_on_the_command_line(arguments_expected: tuple[list[str], str], command: Command) -> None:
    Path("run.yaml").write_text(NET + "trainer:\n  callbacks: [mymodel.Watcher]\n")
    arguments, expected = arguments_expected
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert expected in err
    assert arguments == [] or err.count("\n") <= 6


def test_names_are_checked_before_torch_is_imported(project: Path) -> None:
    Path("run.yaml").write_text("modul: x.py:X\ntrainer:\n  max_epoch: 3\n")
    code = "import sys\nfrom trainer.__main__ import main\n"
    ended = run_python(f"{code}print(main(['fit', '--config', 'run.yaml']), 'torch' in sys.modules)")
    assert ended.stdout == "2 False\n", ended.stderr
    assert ended.stderr.startswith("error: 2 problems in the configuration:"), ended.stderr


def test_all_mistakes_come_at_once_file_by_file_from_top_to_bottom(command: Command) -> None:
    """But unknown keys and files that are not there come before what needs an import."""

    def places(*arguments: str) -> list[str]:
        code, _, err = command("fit", "--config", "base.yaml", *arguments)
        assert code == 2
        return [line[4:].split(": ")[0] for line in err.splitlines()[1:]]

    wrong = net("lrr: 1", "width: x") + "trainer:\n  strategy: dpd\n  precision: x\n"
    Path("base.yaml").write_text(wrong)
    Path("more.yaml").write_text("trainer:\n  max_steps: 2.5\n  seed: -1\n")
    expected = ["command line"] + [f"base.yaml:{n}" for n in (4, 5, 7, 8)] + [f"more.yaml:{n}" for n in (2, 3)]
    assert places("more.yaml", "--trainer.max_epochs", "{}") == expected
    Path("base.yaml").write_text(wrong + "  max_epocs: 3\n")
    assert places("none.yaml", "--lr", "3", "--trainer.max_epoch", "3") == ["command line"] * 2 + [
        "base.yaml:9",
        "none.yaml",
    ]


def test_several_unreadable_files_are_reported_together(command: Command) -> None:
    Path("a.yaml").write_text("x: [1\n")
    Path("b.json").write_text("{\n")
    code, _, err = command("fit", "--config", "a.yaml", "b.json", "c.toml")
    assert code == 2
    assert [line[4:].partition(": ")[0] for line in err.splitlines()[1:]] == ["a.yaml:2", "b.json:2", "c.toml"]


def test_only_one_process_of_a_machine_speaks(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command("fit", "--config", "nothing.yaml") == (2, "", "")
    monkeypatch.delenv("RANK")  # left over from another program: this is the only process
    assert "nothing.yaml" in command("fit", "--config", "nothing.yaml")[2]


def test_an_error_of_the_run_names_the_users_line_without_a_traceback(command: Command) -> None:
    Path("run.yaml").write_text(NET + "trainer: {max_steps: 1, enable_progress_bar: false}\n")
    code, _, err = command("fit", "--config", "run.yaml")
    assert code == 2
    assert "train_dataloader" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "name", ["builtins.object", "sys.exit", "time.sleep", "odd.py:lie", "x" * 5000, f"{'x' * 5000}.Net"]
)
def test_classes_that_are_none(name: str, command: Command) -> None:
    Path("odd.py").write_text("lie = 3\ndef __getattr__(name):\n    raise RuntimeError('not here')\n")
    code, _, error = command("fit", f"--module={name}")
    assert code == 2, error
    assert error.startswith("error: ")
    assert len(error) < 3000


@pytest.mark.parametrize(
    "line",
    [
        ("estimate", "--params", "1e999"),
        ("estimate", "--params", "7B", "--nproc-per-node", "9" * 5000),
        ("launch", "--nproc-per-node", "9" * 5000, "train.py"),
        ("launch", "--nnodes", "9" * 5000, "train.py"),
        ("launch", "--max-restarts", "9" * 5000, "train.py"),
        ("launch", "--nnodes", "2", "--rdzv", f"host:{'9' * 5000}", "train.py"),
        ("launch", "--slurm", "--print", "--nodes", "9" * 5000, "train.py"),
        ("launch", "x" * 5000),
        ("fit", "--config", "x" * 5000 + ".yaml"),
    ],
    ids=lambda line: " ".join(word[:20] for word in line),
)
def test_arguments_that_are_too_long(line: tuple[str, ...], command: Command) -> None:
    Path("train.py").write_text("")
    code, _, error = command(*line)
    assert code == 2, error
    assert "error: " in error
    assert "Traceback" not in error


def test_a_value_of_the_command_line_does_not_hide_a_wrong_one_of_the_file(command: Command) -> None:
    Path("list.yaml").write_text(NET + "trainer: [{max_steps: 1}]\n")
    code, _, error = command("fit", "--config", "list.yaml", "--trainer.max_epochs=1", "--dry-run")
    assert code == 2
    assert 'list.yaml:2: trainer: given [{"max_steps": 1}], allowed: the trainer\'s arguments by name.' in error


def test_a_file_with_very_many_mistakes_gives_a_short_message(command: Command) -> None:
    Path("many.yaml").write_text(NET + "trainer:\n" + "".join(f"  argument_{number}: 1\n" for number in range(5000)))
    code, _, error = command("fit", "--config", "many.yaml")
    assert code == 2
    assert "5000 problems" in error
    assert "and 4970 more" in error
    assert len(error) < 20_000
