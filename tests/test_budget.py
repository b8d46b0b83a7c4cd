"""The budget of the product: how much there is to read, and how many calls its main journeys make. It only falls.

`python -m tests.test_budget` writes today's numbers into the table where they are below its limits.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from math import ceil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TABLE = """
room                     | lines of code | branches     | per statement | files
any room                 |               |              | > 0.36        | > 28
the product              | 44251 > 39000 | 12107 > 9800 | 0.291 > 0.28  | 327
callbacks                | 4174          | 1049         | 0.268         | -
strategies               | 707           | 195          | 0.294         | 7
strategies/deepspeed     | 1426          | 343          | 0.282         | 9
strategies/fsdp          | 1473          | 439          | 0.307         | 9
strategies/xla           | 496           | 112          | 0.235         | 5
trainer                  | 4394          | 1104         | 0.271         | 14
trainer/checkpoint       | 3805          | 1141         | 0.304         | 28
trainer/cli              | 2181          | 472          | 0.25          | 23
trainer/cli/checkpoint   | 894           | 248          | 0.326         | 7
trainer/cli/config       | 690           | 146          | 0.281         | 7
trainer/cli/doctor       | 422           | 81           | 0.2           | 6
trainer/cli/estimate     | 490           | 159          | 0.349         | 5
trainer/cli/migrate      | 964           | 282          | 0.362         | 7
trainer/cli/runs         | 267           | 99           | 0.345         | 3
trainer/cli/tune         | 113           | 16           | 0.239         | 2
trainer/compat           | 1505          | 178          | 0.179         | 13
trainer/config           | 1856          | 611          | 0.326         | 14
trainer/data             | 2581          | 837          | 0.317         | 21
trainer/distributed      | 1121          | 296          | 0.278         | 14
trainer/engine           | 1138          | 317          | 0.306         | 5
trainer/fault_tolerance  | 1192          | 281          | 0.229         | 14
trainer/float8           | 130           | 35           | 0.258         | 3
trainer/launchers        | 759           | 192          | 0.256         | 9
trainer/loop             | 2849          | 723          | 0.263         | 14 > 14
trainer/metrics          | 1364          | 426          | 0.308         | 11
trainer/model            | 1978          | 676          | 0.343         | 22
trainer/testing          | 350           | 64           | 0.21          | 5
trainer/tuner            | 660           | 179          | 0.285         | 6
trainer/guards           | 724           | 189          | 0.25          | 10
trainer/names            | 206           | 43           | 0.187         | 6
trainer/runs             | 1701          | 577          | 0.359         | 13
trainer/state            | 1029          | 380          | 0.352         | 9
strategies/parallel      | 2233          | 641          | 0.325         | 14
trainer/compat/as_lightning| 1             | 0            | 0             | 1

reserve                  | lines of code | branches     |               | files
Packages                 | 1622 of 1622  | 424 of 424   |               | 9 of 9
Optimizers               | 0 of 1300     | 0 of 325     |               | 0 of 8
Time travel              | 0 of 1000     | 0 of 250     |               | 0 of 6
Agents                   | 0 of 1400     | 0 of 350     |               | 0 of 9

functions                | number
complexity over 15, loop | 0 > 0
complexity over 20       | 0 > 0

words, at least          | for a line of code
docstrings and comments  | 0.22

journey                  | calls
Trainer(...)             | 295 > 300
fit to on_fit_start      | 2133 > 2500
shell to Trainer.fit     | 1571 > 4500
save_checkpoint          | 861 > 900
load_from_checkpoint     | 649 > 700
"""
"""Each number: its limit, and after ">" where it has to arrive; of a reserve, what is spent of it.

A room is a folder. What its row does not say stands in the row of any room; of `callbacks/`, with a file for each
plug, files are not counted. The limits of the product do not rise: a change takes out as much as it adds, or spends
what is reserved for its issue, one branch for four lines and one file for 150. "The loop" is `trainer/loop/`,
`guards/`, `state/`, `runs/` and `trainer/trainer.py`.
"""

MARGINS = {"lines of code": 20.0, "branches": 10.0, "per statement": 0.005, "calls": 3.0}
"""How far a number may be below its limit before the limit has to follow it."""


# -- what there is to read ---------------------------------------------------------------------------------------------


@dataclass
class Count:
    """What a file, a room or the product has."""

    code: int = 0
    """Lines with code: not docstrings, docstrings of attributes, comments, blank lines."""
    words: int = 0
    """Lines of docstrings, and those with nothing but a comment."""
    branches: int = 0
    statements: int = 0
    files: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def figures(self) -> dict[str, float]:
        """Return the numbers under the names of the table's columns."""
        share = ceil(1000 * self.branches / max(self.statements, 1)) / 1000
        return {"lines of code": self.code, "branches": self.branches, "per statement": share, "files": self.files}


ONE_BRANCH = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.match_case)
NO_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}


def count(source: str, tree: ast.Module) -> Count:
    """Count a file of Python."""
    docstrings, comments, code, found = set[int](), set[int](), set[int](), Count(files=1)
    for node in ast.walk(tree):
        found.branches += isinstance(node, ONE_BRANCH)
        found.branches += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        found.statements += isinstance(node, ast.stmt)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    found.code = len(code - docstrings)
    found.words = len(docstrings | (comments - code))
    return found


def complexity(function: ast.AST) -> int:
    """Return how many ways lead through a function, with those through the functions in it."""
    ways = 1
    for node in ast.walk(function):
        ways += isinstance(node, (*ONE_BRANCH, ast.Assert))
        ways += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        ways += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return ways


@cache
def sources() -> dict[str, str]:
    """Return the product's files by their paths, without those of the links in `trainer/`."""
    paths = [
        Path(folder, name)
        for part in ("trainer", "strategies", "callbacks")
        for folder, _, names in os.walk(ROOT / part)  # does not follow links to folders
        for name in names
        if name.endswith(".py") and not Path(folder, name).is_symlink()
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}


@cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse(source) for path, source in sources().items()}


@cache
def rooms() -> dict[str, Count]:
    """Return the count of each folder, and that of the product, of whose files those of `callbacks/` are left out."""
    found: dict[str, Count] = {}
    for path, source in sources().items():
        room = path.rpartition("/")[0]
        found[room] = found.get(room, Count()) + count(source, trees()[path])
    product = sum(found.values(), Count())
    return {"the product": replace(product, files=product.files - found["callbacks"].files), **found}


@cache
def complex_functions() -> dict[str, list[str]]:
    """Return the functions of each row of the table, the most complex first."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    ways = sorted(
        (
            (complexity(node), path, node.name)
            for path, tree in trees().items()
            for node in ast.walk(tree)
            if isinstance(node, kinds)
        ),
        reverse=True,
    )
    in_the_loop = tuple(f"trainer/{one}" for one in ("loop/", "guards/", "state/", "runs/", "trainer.py"))
    return {
        "complexity over 15, loop": [f"{w} {p}: {f}" for w, p, f in ways if w > 15 and p.startswith(in_the_loop)],
        "complexity over 20": [f"{w} {p}: {f}" for w, p, f in ways if w > 20],
    }


# -- calls -------------------------------------------------------------------------------------------------------------

JOURNEY = '''
"""Count the calls of the product's functions on a journey, in a process that has made no other: ROOT NAME."""

import gc
import json
import os
import sys

gc.disable()  # else a collection would decide when finalizers run
root, name = sys.argv[1:]
folders = tuple(os.path.join(root, folder, "") for folder in ("trainer", "strategies", "callbacks"))
calls, is_ours = 0, {}


def see(frame, event, argument):
    global calls
    code = frame.f_code
    if event != "call" or not code.co_flags & 1:  # CO_OPTIMIZED, which bodies of modules and classes do not have
        return
    if code.co_filename not in is_ours:
        is_ours[code.co_filename] = os.path.realpath(code.co_filename).startswith(folders)
    calls += is_ours[code.co_filename]
    if code.co_qualname == "Trainer.fit" and name == "shell to Trainer.fit":
        stop(name)
        os._exit(0)


def start():
    global calls
    calls = 0
    sys.setprofile(see)


def stop(journey):
    sys.setprofile(None)
    with open("calls", "a") as file:
        print(json.dumps([journey, calls]), file=file)


if name == "shell to Trainer.fit":
    sys.argv = ["trainer", "fit", "--config", "run.yaml"]
    start()
    from trainer.__main__ import main

    sys.exit(main())

from small import Small, data
from trainer import Trainer

if name == "load_from_checkpoint":
    start()
    Small.load_from_checkpoint("saved")
    stop(name)
else:
    start()
    trainer = Trainer(max_epochs=1, accelerator="cpu")
    stop("Trainer(...)")
    module, batches = Small(), data()
    module.on_fit_start = lambda: stop("fit to on_fit_start")
    start()
    trainer.fit(module, batches)
    start()
    trainer.save_checkpoint("saved")
    stop("save_checkpoint")
'''

SMALL = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import DataModule, TrainModule


class Small(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data():
    return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)


class Data(DataModule):
    def train_dataloader(self):
        return data()
"""

CONFIGURATION = """\
module:
  class_path: small.py:Small
data:
  class_path: small.py:Data
trainer:
  max_epochs: 1
  accelerator: cpu
  seed: 1
"""


def why_calls_differ() -> str | None:
    """Return why the calls here are not those of the table; None: Python and torch are those it was made with."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    torch = metadata.version("torch").partition("+")[0]
    if sys.version_info[:2] != (3, 11) or pinned is None or torch != pinned[1]:
        return "calls are counted with Python 3.11 and the torch of constraints.txt: others call other functions"
    return None


def count_calls(folder: Path) -> dict[str, int]:
    """Return the calls of each journey, which write into an empty folder."""
    for name, text in (("journey.py", JOURNEY), ("small.py", SMALL), ("run.yaml", CONFIGURATION)):
        (folder / name).write_text(text)
    # Nothing of what is around the tests: how often variables are looked at depends on how many there are.
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    for journey in ("Trainer(...)", "load_from_checkpoint", "shell to Trainer.fit"):  # the first goes on to the save
        command = [sys.executable, "journey.py", str(ROOT), journey]
        ended = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(json.loads(line) for line in (folder / "calls").read_text().splitlines())


# -- the table ---------------------------------------------------------------------------------------------------------

Figures = dict[str, dict[str, float]]
"""Numbers by the row and the column of the table."""
RESERVED = ("lines of code", "branches", "files")


def figures_to_read() -> Figures:
    """Return all figures but the calls."""
    product = rooms()["the product"]
    return {
        **{name: found.figures() for name, found in rooms().items()},
        **{name: {"number": len(found)} for name, found in complex_functions().items()},
        "docstrings and comments": {"for a line of code": product.words / product.code},
    }


def figures_of_calls(folder: Path) -> Figures:
    return {journey: {"calls": calls} for journey, calls in count_calls(folder).items()}


class Table:
    """The text of each cell by row and column, and the numbers in it."""

    def __init__(self, text: str) -> None:
        self.blocks: dict[str, dict[str, dict[str, str]]] = {}
        for block in text.strip().split("\n\n"):
            header, *lines = block.splitlines()
            columns = [column.strip() for column in header.split("|")]
            rows = [[cell.strip() for cell in line.split("|")] for line in lines]
            self.blocks[header] = {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
        self.rooms, self.reserves, *_ = self.blocks.values()

    def __str__(self) -> str:
        blocks = []
        for header, rows in self.blocks.items():
            widths = [len(cell) for cell in header.split("|")]
            cells = [[name, *(f" {cell}" for cell in cells.values())] for name, cells in rows.items()]
            lines = ["|".join(map(str.ljust, line, widths)).rstrip() for line in cells]
            blocks.append("\n".join([header, *lines]))
        return "\n" + "\n\n".join(blocks) + "\n"

    def row(self, name: str) -> dict[str, str]:
        return next((rows[name] for rows in self.blocks.values() if name in rows), {})

    def is_room(self, row: str) -> bool:
        return row in self.rooms and row not in ("any room", "the product")

    def limit(self, row: str, column: str) -> float:
        """Return a cell's limit, the product's with what it has of the reserves; infinity: it is not counted."""
        text = self.row(row).get(column, "")
        return float("inf") if text == "-" else float(text.partition(">")[0] or 0) + self._spent(row, column)

    def end(self, row: str, column: str) -> float:
        """Return where a number has to arrive; infinity: nowhere."""
        own, of_any = (self.row(name).get(column, "").partition(">")[2] for name in (row, "any room"))
        return float(own or (self.is_room(row) and of_any) or "inf")

    def set_limit(self, row: str, column: str, limit: float) -> None:
        """Write a limit, without what the reserves add to it, and leave the rest of the cell."""
        _, sign, end = self.row(row)[column].partition(" >")
        self.row(row)[column] = f"{limit - self._spent(row, column):g}{sign}{end}"

    def _spent(self, row: str, column: str) -> float:
        if row != "the product" or column not in RESERVED:
            return 0
        return sum(float(cells[column].partition("of")[0]) for cells in self.reserves.values())


def each(figures: Figures) -> Iterator[tuple[str, str, float]]:
    return ((row, column, number) for row, numbers in figures.items() for column, number in numbers.items())


def differences(table: Table, figures: Figures) -> list[str]:
    """Return the numbers that are not within their limits, or far below them."""
    found = []
    for row, column, number in each(figures):
        limit = table.limit(row, column)
        if column == "for a line of code":
            if number < limit:
                found.append(f"{row}, {column}: {number:.4f} is less than {limit:g}")
        elif number > limit:
            listed = "".join(f"\n    {function}" for function in complex_functions().get(row, []))
            found.append(f"{row}, {column}: {number:g} is more than {limit:g}{listed}")
        elif number < limit - MARGINS.get(column, 0) and limit < float("inf"):
            found.append(f"{row}, {column}: write {number:g} for {limit:g}, as python -m tests.test_budget does")
    return found


def contradictions(table: Table) -> list[str]:
    """Return where the table is at odds with itself, or with the folders that there are."""
    listed = {row for row in table.rooms if table.is_room(row)}
    found = [f"{row}: there is no such folder" for row in sorted(listed - rooms().keys())]
    for column in RESERVED:
        for name, cells in table.reserves.items():
            spent, granted = map(float, cells[column].split("of"))
            if spent > granted:
                found.append(f"{name}, {column}: {spent:g} are spent, {granted:g} are reserved")
        limits = [table.limit(row, column) for row in listed]
        together, most = sum(limit for limit in limits if limit < float("inf")), table.limit("the product", column)
        if together > most:
            found.append(f"the rooms, {column}: their limits are {together:g} together, the product's is {most:g}")
    return found


def lowered(table: Table, figures: Figures, moved: bool = False) -> Table:
    """Return the table with today's numbers where they are below its limits, and with the rooms that there are.

    Args:
        moved: code has moved between rooms. In a column in which the product is within its limit, limits of rooms
            rise, too, but not beyond where they have to arrive.
    """
    new = Table(str(table))
    for row in [row for row in table.rooms if table.is_room(row) and row not in figures]:
        del new.rooms[row]
    for row in sorted(row for row in figures if not table.row(row)):
        new.rooms[row] = dict.fromkeys(figures[row], "0")
    for row, column, number in each(figures):
        limit = new.limit(row, column)
        fits = figures["the product"].get(column, 0) <= table.limit("the product", column)
        if new.is_room(row) and fits and (moved or row not in table.rooms):
            limit = max(limit, new.end(row, column))
        if new.row(row)[column] != "-" and column != "for a line of code":
            new.set_limit(row, column, min(limit, number))
    return new


# -- the tests ---------------------------------------------------------------------------------------------------------


def test_what_there_is_to_read_is_within_the_budget() -> None:
    table = Table(TABLE)
    assert [*differences(table, figures_to_read()), *contradictions(table)] == []


def test_the_calls_of_the_main_journeys_are_within_the_budget(tmp_path: Path) -> None:
    if why := why_calls_differ():
        pytest.skip(why)
    assert differences(Table(TABLE), figures_of_calls(tmp_path)) == []


def test_the_table_is_written_as_it_was_read() -> None:
    assert str(Table(TABLE)) == TABLE


EXAMPLE = """
room        | lines of code | branches | per statement | files
any room    |               |          | > 0.3         | > 9
the product | 300 > 200     | 60       | 0.3           | 6
a           | 100           | 20       | 0.2           | 3
b           | 200           | 40       | 0.4           | 3

reserve     | lines of code | branches |               | files
Issue       | 0 of 40       | 0 of 10  |               | 0 of 1
"""


def example(a: int, b: int, share: float = 0.2) -> Figures:
    """Return the figures of a product of two rooms with these lines of code; `share`: of branches in room a."""
    others = {"branches": 20, "per statement": share, "files": 3}
    product = {"lines of code": a + b, "branches": 60, "per statement": 0.3, "files": 6}
    return {
        "the product": product,
        "a": {"lines of code": a, **others},
        "b": {"lines of code": b, **others, "branches": 40, "per statement": 0.4},
    }


def limits(table: Table, column: str = "lines of code") -> list[float]:
    return [table.limit(row, column) for row in table.rooms if row != "any room"]


def test_limits_fall_and_those_of_rooms_rise_only_with_what_other_rooms_lose() -> None:
    table = Table(EXAMPLE)
    assert differences(table, example(100, 185)) == []
    assert len(differences(table, example(100, 170))) == 2  # the room and the product
    assert limits(lowered(table, example(100, 170))) == [270, 100, 170]
    assert limits(lowered(table, example(150, 140))) == [290, 100, 140]
    assert limits(lowered(table, example(150, 140), moved=True)) == [290, 150, 140]
    assert limits(lowered(table, example(150, 160), moved=True)) == [300, 100, 160]
    assert limits(lowered(table, example(100, 200, share=0.35), moved=True), "per statement") == [0.3, 0.3, 0.4]
    assert lowered(table, example(100, 170)).rooms["the product"]["lines of code"] == "270 > 200"


def test_a_reserve_raises_the_limit_of_the_product_by_what_is_spent_of_it() -> None:
    table = Table(EXAMPLE.replace("0 of 40", "30 of 40"))
    assert limits(lowered(table, example(130, 200), moved=True)) == [330, 130, 200]
    assert lowered(table, example(130, 190), moved=True).rooms["the product"]["lines of code"] == "290 > 200"
    assert "50 are spent" in contradictions(Table(EXAMPLE.replace("0 of 40", "50 of 40")))[-1]
    assert "together" in contradictions(Table(EXAMPLE.replace("| 100 ", "| 101 ")))[-1]


def test_rooms_come_and_go() -> None:
    figures = example(100, 200)
    figures["c"] = figures.pop("b")
    new = lowered(Table(EXAMPLE), figures)
    assert limits(new) == [300, 100, 200]
    assert limits(new, "per statement") == [0.3, 0.2, 0.3]


def test_a_file_is_counted() -> None:
    source = '''"""Two
    lines."""

# one

X = 1  # code
"""Of X."""

def f(a, b):
    """One."""
    if a and b or a:
        return [c for c in a if c]
    text = """not
    a docstring"""
    match a:
        case 1:
            return b if a else text
'''
    tree = ast.parse(source)
    found = count(source, tree)
    assert (found.code, found.words, found.branches, found.statements) == (9, 5, 6, 10)
    assert complexity(tree) == 8
    assert found.figures()["per statement"] == 0.6


def main(arguments: list[str]) -> int:
    """Write today's numbers into the table where they are below its limits, print it and what does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        figures = {**figures_to_read(), **({} if why_calls_differ() else figures_of_calls(Path(folder)))}
    table = lowered(Table(TABLE), figures, moved="--moved" in arguments)
    file = Path(__file__)
    file.write_text(file.read_text().replace(TABLE, str(table), 1))
    problems = [*differences(table, figures), *contradictions(table)]
    print(table, *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
