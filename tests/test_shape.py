"""The shape of the house: the order of its rooms, frames, lengths, wiring, weight."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from inspect import getdoc, isclass, signature
from itertools import pairwise
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import trainer
import trainer.callbacks
import trainer.strategies
from tests.helpers.processes import run_python
from trainer import Trainer, TrainModule
from trainer.callback import HOOKS, Callback
from trainer.callbacks import CALLBACKS
from trainer.loop.callback_list import CallbackList
from trainer.runs.hook_checks import parameters_of
from trainer.settings import ARGUMENTS
from trainer.strategies import STRATEGIES
from trainer.strategy import Strategy

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES_OF_A_FUNCTION = 59


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, which most tests here go through."""
    return ast.parse(source)


# -- rooms -------------------------------------------------------------------------------------------------------------

ROOMS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("names",),
    ("arguments", "float8"),
    ("precision", "hyperparameters", "optimizers", "settings"),
    ("distributed",),
    ("model",),
    ("metrics", "fault_tolerance", "seed"),
    ("checkpoint", "launchers"),
    ("data",),
    ("module",),
    ("callback", "strategy"),
    ("logger",),
    ("runs",),
    ("guards",),
    ("state",),
    ("loop", "strategies"),
    ("trainer", "engine"),
    ("callbacks", "config", "tuner"),
    ("compat",),
    ("cli", "testing"),
    ("__main__",),
)
"""At run time a room imports only rooms of earlier rows, and inside itself no circle."""

AT_A_MISS = {"names.misses", "names.paths", "runs.resolved_config"}
"""Files that import `compat` inside a function, when a name that is not here is asked for, or `plugins=` are given."""


def files() -> dict[str, Path]:
    """Return the package's files by the name under which they are imported, without `trainer.`."""
    found = {}
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        if not {"strategies", "callbacks", "examples"} & set(path.relative_to(ROOT / "trainer").parts[:1]):
            found[_dotted(path.relative_to(ROOT / "trainer"))] = path
    for folder in ("strategies", "callbacks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[_dotted(path.relative_to(ROOT))] = path
    return found


def _dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix("__init__").removesuffix(".")


FILES = files()


def found_in(names: Iterable[str], rule: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what a rule finds in the source of each of these files, without the files in which it finds nothing."""
    return {name: found for name in names if (found := rule(FILES[name].read_text()))}


def room_of(name: str) -> str:
    return name.split(".")[0]


def row_of(name: str) -> int | None:
    """Return the row of ROOMS that lists a file's room; None: there is none."""
    return next((number for number, row in enumerate(ROOMS) if room_of(name) in row), None)


def run_time_nodes(nodes: Any) -> Iterator[ast.AST]:
    """Return all nodes except those under `if TYPE_CHECKING:`."""
    for node in nodes:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from run_time_nodes(node.orelse)
        else:
            yield node
            yield from run_time_nodes(ast.iter_child_nodes(node))


def imports_of(source: str, types: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Return the imports from `trainer`, also inside functions: (module without `trainer.`, names).

    `types`: also those under `if TYPE_CHECKING:`.
    """
    tree = parsed(source)
    for node in ast.walk(tree) if types else run_time_nodes(tree.body):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            if node.module is not None and node.module.split(".")[0] == "trainer":
                yield node.module.removeprefix("trainer").removeprefix("."), [n.name for n in node.names]
        elif isinstance(node, ast.Import):
            for imported in node.names:
                if imported.name.split(".")[0] == "trainer":
                    yield imported.name.removeprefix("trainer").removeprefix("."), []


def wrong_imports(name: str, source: str) -> list[str]:
    """Return the imports of a file that the order of the rooms forbids."""
    own = row_of(name)
    if own is None:
        return [f"trainer.{name} is in no room: give it a place in ROOMS"]
    wrong = []
    for imported, names in imports_of(source):
        if not imported:
            if set(names) - {"__version__"}:
                wrong.append(f"trainer.{name}: from trainer import {', '.join(names)}: import from the submodule")
            continue
        theirs = row_of(imported)
        if room_of(imported) == "compat" and name in AT_A_MISS:
            continue
        if room_of(name) != room_of(imported) and (theirs is None or theirs >= own):
            wrong.append(f"trainer.{name} (row {own}) imports trainer.{imported} (row {theirs})")
    return wrong


def test_a_file_imports_only_from_earlier_rooms() -> None:
    assert [wrong for name, path in FILES.items() if name for wrong in wrong_imports(name, path.read_text())] == []


FOR_EDITORS = {
    "callback": {"module", "trainer"},
    "logger": {"module", "trainer"},
    "module": {"callback", "trainer"},
    "data.datamodule": {"trainer"},
}
"""Files whose subclasses users write: imports of types, by which an editor completes the arguments of their methods."""


def import_graph(types: bool) -> dict[str, set[str]]:
    """Return the files that each file imports; `types`: also for types alone, apart from `FOR_EDITORS`."""
    graph: dict[str, set[str]] = {name: set() for name in FILES}
    for name, path in FILES.items():
        for imported, names in imports_of(path.read_text(), types):
            inside = {f"{imported}.{n}" for n in names} & FILES.keys()
            graph[name] |= (inside or {imported}) - {""}
        graph[name] -= FOR_EDITORS.get(name, set()) if types else set()
    return graph


@pytest.mark.parametrize("types", [False, True], ids=["run time", "types"])
def test_no_file_imports_itself_through_others(types: bool) -> None:
    try:
        list(TopologicalSorter(import_graph(types)).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


BY_NAME = {
    "",
    "callback",
    "strategy",
    "cli.main",
    "compat.finder",
    "compat.lightning",
    "config.classes",
    "strategies.xla.strategy",
}
"""Files that import modules by name: tables of public names, callbacks, strategies and commands; others' modules."""


def test_no_other_file_hides_an_import_behind_a_name() -> None:
    words = ("import_module(", "__import__(", 'sys.modules["trainer')
    assert {name for name, path in FILES.items() if any(word in path.read_text() for word in words)} == BY_NAME


def test_the_table_of_rooms_in_the_documentation_is_that_of_the_test() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| room | job |")[1].split("\n\n")[0]
    names = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert [tuple(name.strip(" `/") for name in row.split(",")) for row in names] == list(ROOMS)


def test_words_for_names_that_are_not_here_are_imported_at_a_miss_alone() -> None:
    outside = [name for name in FILES if room_of(name) not in ("compat", "cli")]
    imported = {name: [ast.unparse(node) for node in parsed(FILES[name].read_text()).body] for name in outside}
    at_import = {name for name, lines in imported.items() for line in lines if line.startswith("from trainer.compat")}
    in_functions = {name for name in outside if "trainer.compat" in FILES[name].read_text()}
    assert (at_import, in_functions) == (set(), {"", *AT_A_MISS})


def test_every_room_exists() -> None:
    assert {room for row in ROOMS for room in row} == {room_of(name) for name in FILES if name}


def test_no_output_of_a_run_is_among_the_files_of_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("no git repository")
    folders = {name.partition("/")[0] for name in listed.stdout.splitlines() if "/" in name}
    known = {
        *(".ci", ".github", "benchmarks", "callbacks", "docs", "editable", "examples", "strategies"),
        *("tests", "trainer"),
    }
    assert folders <= known


# -- no code depends on a concrete strategy ----------------------------------------------------------------------------


OTHER_MEANINGS = {"xla", "deepspeed"}
"""Names of strategies that are also a type of device, or a package."""


def strategy_branches(source: str) -> list[str]:
    """Return the lines that know a concrete strategy: its class, its file, or its name."""
    classes = {kind.__name__ for kind in STRATEGIES.values()} | {"DistributedStrategy"}
    modules = {kind.__module__ for kind in STRATEGIES.values()} | {"trainer.strategies.distributed"}
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Name) and node.id in classes:
            found.append(f"line {node.lineno}: {node.id}")
        elif isinstance(node, ast.Attribute) and node.attr in classes:
            found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and (
            node.module in modules or classes & {imported.name for imported in node.names}
        ):
            found.append(f"line {node.lineno}: import of {node.module}")
        elif isinstance(node, ast.Constant) and node.value in STRATEGIES and node.value not in OTHER_MEANINGS:
            found.append(f"line {node.lineno}: the name {node.value!r}")
    return found


def test_nothing_outside_strategies_asks_which_strategy_it_has() -> None:
    knowing = ("strategies", "strategy", "compat.names")  # the last is the table of names
    outside = [name for name in FILES if not {name, room_of(name)} & {*knowing}]
    assert found_in(outside, strategy_branches) == {}


def asks_for_a_callback(source: str) -> list[str]:
    """Return the lines with an `isinstance` on a concrete callback, also one that is looked up by its name."""
    tree = parsed(source)
    looked_up = {"callback_named", "available_callbacks"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _names_in(node.value) & looked_up:
            looked_up |= _names_in(*node.targets)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            concrete = _names_in(node.args[1]) & (CALLBACKS.keys() | looked_up)
            found += [f"line {node.lineno}: {name}" for name in sorted(concrete)]
    return found


def _names_in(*nodes: ast.AST) -> set[str]:
    named = [part for node in nodes for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))]
    return {part.id if isinstance(part, ast.Name) else part.attr for part in named}


def test_no_code_asks_for_a_concrete_callback() -> None:
    assert found_in(FILES, asks_for_a_callback) == {}


def test_one_file_asks_in_which_storage_a_path_lies() -> None:
    asks = re.compile(r"isinstance\([^()]*\bRemotePath\b")
    assert found_in(FILES, asks.findall).keys() == {"checkpoint.storage"}


# -- one object, complete when made ------------------------------------------------------------------------------------


SETTERS = {"accumulate_grad_batches"}
"""Attributes of the trainer that a callback may set."""


def assignments_to_the_trainer(source: str) -> list[str]:
    """Return statements that assign to an attribute of a trainer that is not their own object."""
    found = []
    for node in ast.walk(parsed(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in [inner for outer in targets for inner in ast.walk(outer)]:
            if not isinstance(target, ast.Attribute) or not isinstance(target.ctx, ast.Store):
                continue
            owner = target.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name.lstrip("_") == "trainer" and target.attr not in SETTERS:
                found.append(f"line {target.lineno}: {ast.unparse(target)}")
    return found


def functions_of_the_trainer(source: str) -> list[str]:
    """Return functions that take the Trainer first, other than hooks, `attach`, and `self.trainer = ...`."""
    found = []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.FunctionDef) or node.name in {*HOOKS, "attach", "trainer"}:
            continue
        given = [argument for argument in [*node.args.posonlyargs, *node.args.args] if argument.arg != "self"]
        if given and (given[0].arg == "trainer" or ast.unparse(given[0].annotation or given[0]) == "Trainer"):
            found.append(f"line {node.lineno}: {node.name}")
    return found


ASSIGNED_BY_THE_LOOP = {
    "trainer": {
        *("clock.watchdog.heartbeats", "clock.watchdog.allow_slow", "step.outputs", "step.data"),
        *("progress.step", "progress.batch", "progress.window", "progress.samples"),
        *("progress.epoch_started", "progress.epoch_ended"),
    },
    "loop.evaluation": {"clock.watchdog.heartbeats", "metrics.batch", "activity.batch"},
    "state.batch_statistics": {"clock.watchdog.heartbeats"},
    "loop.step": {"metrics.batch"},
    "loop.manual": {"step.outputs", "step.data"},
}
"""By file: attributes of parts of a run that are assigned to at every step or batch, where a call would cost time."""


RUN_TYPES = {
    "Run": [],
    "Activity": ["activity"],
    "CallbackList": ["hooks"],
    "Clock": ["clock"],
    "Deadline": ["clock", "deadline"],
    "DelayedSaves": ["saves"],
    "Epoch": ["epoch"],
    "Generators": ["generators"],
    "GradientNorms": ["guards", "gradient_norms"],
    "Guards": ["guards"],
    "HostTimes": ["times"],
    "LatestValues": ["session", "latest"],
    "LoaderEpochs": ["loader_epochs"],
    "Loaders": ["loaders"],
    "LoggedValues": ["values"],
    "MetricLog": ["metrics"],
    "NonFiniteMonitor": ["guards", "nonfinite"],
    "OptionsCheck": ["guards", "options"],
    "Progress": ["progress"],
    "Session": ["session"],
    "SkippedBatches": ["guards", "skipping"],
    "Step": ["step"],
    "StopCoordinator": ["clock", "coordinator"],
    "Watchdog": ["clock", "watchdog"],
}
"""By annotation of a parameter: the attributes from a run to it."""


def assignments_to_a_run(source: str) -> list[str]:
    """Return the attributes of a run, and of its parts, that are assigned to from outside."""
    tree, found = parsed(source), []
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for scope in [tree, *functions]:
        aliases = _names_of_runs(scope)
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.append(_path_in_a_run(node, aliases))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                path = _path_in_a_run(ast.Attribute(node.args[0], "*", ast.Store()), aliases)
                found.append(None if path is None else f"setattr {path}")
    return sorted({path for path in found if path is not None})


def _names_of_runs(scope: ast.AST) -> dict[str, list[str]]:
    """Return the variables that are a run (an empty path), or a part of one (the path to it)."""
    names: dict[str, list[str]] = {"run": [], "_run": []}
    for node in ast.walk(scope):
        if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) in RUN_TYPES:
            names[node.arg] = RUN_TYPES[ast.unparse(node.annotation)]
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs.append((target, node.value))
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(target.elts, node.value.elts, strict=False)
        elif isinstance(node, ast.NamedExpr):
            pairs.append((node.target, node.value))
        for target, value in pairs:
            path = _path_in_a_run(value, names)
            if isinstance(target, ast.Name) and path is not None:
                names[target.id] = path.split(".")
    return names


def _path_in_a_run(node: ast.expr, names: dict[str, list[str]]) -> str | None:
    """Return the attributes between a run and this one, `progress.step` for `run.progress.step`; None: of no run."""
    if not isinstance(node, ast.Attribute):
        return None
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id in names:
        return ".".join([*names[owner.id], node.attr])
    if isinstance(owner, ast.Attribute) and owner.attr in ("run", "_run"):
        return node.attr
    path = _path_in_a_run(owner, names)
    return None if path is None else f"{path}.{node.attr}"


def test_nobody_but_the_loop_assigns_to_a_run_and_what_it_assigns_is_listed() -> None:
    found = found_in([name for name in FILES if name != "loop.run"], assignments_to_a_run)
    assert {name: set(paths) for name, paths in found.items()} == ASSIGNED_BY_THE_LOOP


def test_nobody_assigns_to_the_trainer() -> None:
    assert found_in(FILES, assignments_to_the_trainer) == {}


def test_rooms_below_the_trainer_do_not_take_it() -> None:
    below = [name for name in FILES if name and (row_of(name) or 0) < (row_of("trainer") or 0)]
    assert found_in(below, functions_of_the_trainer) == {}


def test_helpers_above_the_trainer_take_values() -> None:
    def in_functions(source: str) -> list[str]:
        functions: list[ast.stmt] = [node for node in parsed(source).body if isinstance(node, ast.FunctionDef)]
        return functions_of_the_trainer(ast.unparse(ast.Module(functions, [])))

    above = [name for name in FILES if name.startswith(("callbacks.", "cli.", "config.", "tuner."))]
    assert found_in(above, in_functions) == {}


FOR_USERS = {"get_metrics", "write_on_batch_end", "write_on_epoch_end"}
"""Methods that users override, with the arguments of hooks."""


def takes_the_trainer_for_one_value(source: str) -> list[str]:
    """Return the methods that take the trainer, read at most one of its attributes, and pass it to nobody."""
    found = []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.FunctionDef) or node.name in {*HOOKS, *FOR_USERS}:
            continue
        if "trainer" in [argument.arg for argument in node.args.args]:
            uses = [part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == "trainer"]
            read = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and part.value in uses]
            if len(uses) == len(read) and len({part.attr for part in read}) < 2:
                found.append(node.name)
    return found


def test_a_helper_that_needs_one_value_takes_it() -> None:
    names = [name for name in FILES if name.startswith(("callbacks.", "cli.", "config."))]
    assert found_in(names, takes_the_trainer_for_one_value) == {}


def private_names_of_other_files(sources: dict[str, str]) -> list[str]:
    """Return the private attributes and methods that a class overrides of a class in another file."""
    homes: dict[str, str] = {}
    bases: dict[str, list[str]] = {}
    own: dict[str, set[str]] = {}
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name] = file
                bases[node.name] = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                targets = [part.targets[0] for part in node.body if isinstance(part, ast.Assign)]
                targets += [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
                own[node.name] = {name for name in names if name.startswith("_") and not name.endswith("__")}

    def ancestors(name: str) -> Iterator[str]:
        for base in bases.get(name, []):
            yield base
            yield from ancestors(base)

    return [
        f"{name}.{private} of {base}"
        for name, names in own.items()
        for base in ancestors(name)
        for private in sorted(names & own.get(base, set()))
        if homes[base] != homes[name]
    ]


def test_no_class_overrides_a_private_name_of_another_file() -> None:
    assert private_names_of_other_files({name: path.read_text() for name, path in FILES.items()}) == []


def test_the_trainer_is_no_subclass_and_loop_helpers_do_not_know_it() -> None:
    assert Trainer.__bases__ == (object,)
    for name in FILES:
        if name.startswith("loop."):
            assert "trainer.trainer" not in FILES[name].read_text()


def test_hooks_with_the_trainer_bound_are_declared_one_by_one() -> None:
    assert set(CallbackList.__annotations__) == set(HOOKS)
    for hook, annotation in CallbackList.__annotations__.items():
        given = ast.parse(annotation, mode="eval").body.slice.elts[0]  # type: ignore[attr-defined]
        parameters = parameters_of(getattr(Callback, hook))[2:]
        if parameters[-1:] == ["dataloader_idx=0"]:  # left out where there is one loader
            assert isinstance(given, ast.Constant), hook
        else:
            assert len(given.elts) == len(parameters), hook


# -- lengths -----------------------------------------------------------------------------------------------------------

PYTHON = [path for folder in ("examples", "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
PYTHON += FILES.values()


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of the body, without the docstring."""
    assert function.end_lineno is not None
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    return function.end_lineno - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [
        (path, node) for path in PYTHON for node in ast.walk(parsed(path.read_text())) if isinstance(node, kinds)
    ]
    assert [
        f"{path}: {f.name}: {length_of(f)}" for path, f in functions if length_of(f) > MOST_LINES_OF_A_FUNCTION
    ] == []


# -- from fit to loss.backward() ---------------------------------------------------------------------------------------


class Small(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_backward_is_four_frames_and_two_files_away_from_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[Any] = []
    backward = torch.Tensor.backward

    def patched(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stacks.append(traceback.extract_stack()[:-1])
        backward(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", patched)
    quiet = Trainer(max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False)
    quiet.fit(Small(), DataLoader(torch.ones(4, 1), 2))
    assert len(stacks) == 2
    for stack in stacks:
        start = next(i for i, frame in enumerate(stack) if frame.name.startswith("test_backward_is_four")) + 1
        # Every frame counts, torch's and Python's own too.
        assert [frame.name for frame in stack[start:]] == ["fit", "_train_epoch", "_train_step", "backward"]
        names = {Path(frame.filename).resolve().relative_to(ROOT).as_posix() for frame in stack[start:]}
        assert names == {"trainer/trainer.py", "trainer/strategy.py"}


# -- wiring ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["strategies", "callbacks", "examples"])
def test_the_links_are_there(folder: str) -> None:
    link = ROOT / "trainer" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    package = import_module(f"trainer.{folder}")
    assert Path(str(package.__file__)).resolve() == ROOT / folder / "__init__.py"


LOOK = """
import importlib, json, sys
seen = {}
import trainer
seen["after import trainer"] = sorted({name.split(".")[0] for name in sys.modules})
for folder in ("strategies", "callbacks"):
    try:
        importlib.import_module(folder)
    except ImportError as error:
        seen[folder] = str(error)
from trainer import Callback, DataModule, Logger, Strategy, Trainer, TrainModule
Trainer()
seen["after Trainer()"] = sorted({name.split(".")[0] for name in sys.modules})
DataModule(), TrainModule(), Callback()
seen["words"] = [name for name in sys.modules if name.startswith("trainer.compat")]
hasattr(Trainer(), "fit_loop")
seen["words after a miss"] = [name for name in sys.modules if name.startswith("trainer.compat")]
print(json.dumps(seen))
"""
HEAVY = {
    *("sympy", "tensorboard", "torchmetrics", "deepspeed", "torch_xla", "ray", "sklearn", "pydantic"),
    *("pandas", "matplotlib"),
}


def test_the_second_name_of_a_folder_is_refused_and_heavy_packages_wait_until_they_are_needed() -> None:
    seen = json.loads(run_python(LOOK).check().stdout)
    assert "trainer.strategies" in seen["strategies"]
    assert "trainer.callbacks" in seen["callbacks"]
    assert "torch" not in seen["after import trainer"]
    assert "torch" in seen["after Trainer()"]
    assert not HEAVY & set(seen["after Trainer()"])
    assert seen["words"] == []
    assert "trainer.compat.names" in seen["words after a miss"]


# -- words -------------------------------------------------------------------------------------------------------------


def test_a_module_says_its_job_in_one_sentence() -> None:
    firsts = {
        name: (ast.get_docstring(parsed(path.read_text())) or "").split("\n\n")[0] for name, path in FILES.items()
    }
    assert {name: first for name, first in firsts.items() if not first.endswith(".")} == {}


OPENINGS = {"What", "Which", "Who", "Where", "When", "How", "Why", "As", "Also", "Like", "Called"}


def wrong_openings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [*ast.walk(parsed(source))]
    texts = [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]
    attributes = [text for node in nodes for text in attribute_docstrings(node)]
    wrong = [text for text in texts + attributes if text.split()[0] in OPENINGS]
    return wrong + [text for text in attributes if text.startswith("Whether")]


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    assert found_in(FILES, wrong_openings) == {}


def attribute_docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the strings that stand alone after an assignment, in the block of `node`."""
    body = getattr(node, "body", None)
    for before, after in pairwise(body if isinstance(body, list) else []):
        value = after.value if isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(after, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def public_names() -> dict[str, Any]:
    """Return the names of the three packages, and the public methods of their classes."""
    found = {}
    for package in (trainer, trainer.strategies, trainer.callbacks):
        names = getattr(package, "__all__", [name for name in vars(package) if not name.startswith("_")])
        for name in names:
            thing = getattr(package, name)
            if not callable(thing):
                continue
            found[name] = thing
            if isclass(thing):
                found |= {
                    f"{name}.{method}": value for method, value in vars(thing).items() if not method.startswith("_")
                }
    return found


def test_every_public_name_has_a_docstring() -> None:
    hooks = {*HOOKS, "on_validation_model_zero_grad"}
    hooks |= {f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")}
    without = []
    for name, thing in public_names().items():
        owner, _, method = name.partition(".")
        callable_or_property = (
            isclass(thing) or callable(thing) or isinstance(thing, (property, classmethod, staticmethod))
        )
        if method in hooks or not callable_or_property:
            continue
        inherited = getdoc(
            getattr(getattr(trainer, owner, None) or getattr(trainer.callbacks, owner, None), method, None)
        )
        if not (getdoc(thing) or (method and inherited)):
            without.append(name)
    assert without == []


# -- what to touch -----------------------------------------------------------------------------------------------------

NEW_CALLBACK = '''"""A callback that exists only in this test."""

from trainer.callback import Callback


class Whistle(Callback):
    """Whistles at the end."""
'''
NEW_LOGGER = '''"""A logger that exists only in this test."""

from trainer.logger import Logger


class Whisper(Logger):
    """Keeps nothing."""
'''
NEW_COMMAND = '''"""A command that exists only in this test."""


def run(arguments: list[str]) -> int:
    """Return the number of arguments."""
    return len(arguments)
'''
NEW_STRATEGY = '''"""A strategy that exists only in this test."""

from trainer.strategy import Strategy


class TwinStrategy(Strategy):
    """One device, under another name."""

    name = "twin"
'''
USE = """
from tests.test_contract import PROCESSES
import io
import sys
from contextlib import redirect_stdout
from trainer import Trainer
from trainer.callbacks import Whisper, Whistle
from trainer.cli.config.wizard import ask_all
from trainer.cli.estimate.layouts import strategy_rows
from trainer.cli.main import main
from trainer.config.check import table_of
from trainer.callback import Callback
from trainer.logger import Logger
from trainer.strategies import TwinStrategy
trainer = Trainer(strategy="twin", callbacks=[Whistle()], logger=Whisper(), precision="tiny-mixed")
assert type(trainer.strategy) is TwinStrategy
assert table_of((Callback,))["Whistle"] is Whistle
assert table_of((Logger,))["Whisper"] is Whisper
assert main(["whisper", "this", "that"]) == 2
assert main(["estimate", "--params", "10", "--precision", "tiny-mixed"]) == 0
assert PROCESSES["twin"] == 1
assert "twin" in next(iter(strategy_rows()))
sys.stdin = io.StringIO("\\n".join(["cpu", "1", "2", "twin", "tiny-mixed", "1", "never"]) + "\\n")
draft = ask_all()
assert (draft.settings["strategy"], draft.settings["precision"]) == ("twin", "tiny-mixed")
assert "# One device, under another name\\n  strategy: twin" in draft.text([])
with redirect_stdout(io.StringIO()) as printed:
    assert main(["fit", "--help"]) == 0
assert " twin" in printed.getvalue() and " tiny-mixed" in printed.getvalue()
from tests.helpers.toy import Toy, loader, quiet
trained, resumed = Toy(), Toy()
trainer = quiet(max_epochs=1)
trainer.fit(trained, loader())
trainer.save_checkpoint("saved")
quiet(max_epochs=2).fit(resumed, loader(), ckpt_path="saved")
assert resumed.whistles == 3
"""


def test_what_is_added_is_one_file_and_one_line(tmp_path: Path) -> None:
    for name in ("trainer", "strategies", "callbacks", "tests"):
        copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignore_patterns("__pycache__"))
    (tmp_path / "callbacks" / "whistle.py").write_text(NEW_CALLBACK)
    (tmp_path / "callbacks" / "whisper.py").write_text(NEW_LOGGER)
    (tmp_path / "strategies" / "twin.py").write_text(NEW_STRATEGY)
    (tmp_path / "trainer" / "cli" / "whisper.py").write_text(NEW_COMMAND)
    for package, line in (
        ("callbacks", "from trainer.callbacks.whistle import Whistle as Whistle"),
        ("callbacks", "from trainer.callbacks.whisper import Whisper as Whisper"),
        ("strategies", "from trainer.strategies.twin import TwinStrategy as TwinStrategy"),
    ):
        _insert_line(tmp_path / package / "__init__.py", f"from trainer.{package}.", line)
    command = '    "whisper": ("trainer.cli.whisper", "say little"),'
    _insert_line(tmp_path / "trainer" / "cli" / "main.py", '    "fit":', command)
    precision = '            Precision("tiny-mixed", torch.float32, autocast=torch.bfloat16),'
    _insert_line(tmp_path / "trainer" / "precision.py", "            Precision(", precision)
    state = tmp_path / "trainer" / "loop" / "training_state.py"
    _insert_line(state, '        "config": ', '        "whistles": 3,')
    _insert_line(state, '    "config": ', '    "whistles?": Integer(0),')
    _insert_line(state, "    run.session.latest.all", '    run.module.whistles = checkpoint["whistles"]')
    (tmp_path / "use.py").write_text(USE)
    run_python(tmp_path / "use.py", env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path).check()


@pytest.mark.parametrize("package", [trainer.strategies, trainer.callbacks])
def test_type_checkers_see_the_classes_behind_the_names(package: Any) -> None:
    tree = parsed(Path(package.__file__).read_text())
    # Names that a function looks up are Any for type checkers: the one for unknown names is hidden from these.
    hidden = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING"]
    seen = [node for top in tree.body if top not in hidden for node in ast.walk(top)]
    assert "__getattr__" not in {node.name for node in seen if isinstance(node, ast.FunctionDef)}
    exported = {name.asname for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    table = getattr(package, package.__name__.split(".")[1].upper())
    assert {kind.__name__ for kind in table.values()} <= exported


def _insert_line(path: Path, before: str, line: str) -> None:
    """Insert a line in front of the first one that begins with `before`."""
    lines = path.read_text().splitlines()
    first = next(number for number, text in enumerate(lines) if text.startswith(before))
    path.write_text("\n".join([*lines[:first], line, *lines[first:]]) + "\n")


# -- the surface -------------------------------------------------------------------------------------------------------

BUDGETS = {"hooks": 39, "methods of Strategy": 24, "class attributes of Strategy": 10, "arguments of Trainer": 48}
"""Largest numbers. To come for model parallelism: `order` and `end_window` of a strategy; who reads which data, and who
reports, are said by its `processes`, as rank and world size are."""

OWN_ARGUMENTS = {"activation_checkpointing", "compile", "deadline", "deadline_margin"}
OWN_ARGUMENTS |= {"max_restarts", "seed", "seed_per_sample", "watchdog_seconds"}
"""Arguments that Lightning has not. What is new is a callback, or a value of an argument that exists."""


def test_the_surface_is_within_its_budget() -> None:
    public = {name: value for name, value in vars(Strategy).items() if not name.startswith("_")}
    methods = [name for name, value in public.items() if callable(value) or isinstance(value, property)]
    attributes = {name for name in Strategy.__annotations__ if not name.startswith("_")} | public.keys() - set(methods)
    surface = {
        "hooks": len(HOOKS),
        "methods of Strategy": len(methods),
        "class attributes of Strategy": len(attributes),
        "arguments of Trainer": len(signature(Trainer.__init__).parameters) - 1,
    }
    assert {name: count for name, count in surface.items() if count > BUDGETS[name]} == {}


def test_further_arguments_of_the_trainer_are_lightnings() -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    theirs = signature(lightning.Trainer.__init__).parameters
    assert set(ARGUMENTS) - set(theirs) == OWN_ARGUMENTS
