"""Does a test fail when a line is wrong? `python -m tests.mutants` changes one line at a time, in a copy.

Each mutant of the list below is run with the tests that find it and no others. `python -m tests.mutants draw 7 23`
draws 23 more with the seed 7 and prints them in the list's form, without their tests. With `--tests "..."` it runs each
of them with those pytest arguments and says which ones live.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRAWN_FROM = (
    "trainer/trainer.py",
    "trainer/loop/*.py",
    "trainer/guards/*.py",
    "trainer/metrics/*.py",
    "trainer/engine/*.py",
    "trainer/checkpoint/*.py",
    "strategies/*.py",
    "strategies/fsdp/*.py",
    "strategies/parallel/*.py",
    "strategies/deepspeed/*.py",
)
FOUND, LIVES, WITHOUT_A_TEST = "found", "LIVES", "no such test, or an error before it"


@dataclass(frozen=True)
class Mutant:
    """One changed line: the first line of `place` (a file, `::` and the function in it) that reads `before`."""

    place: str
    before: str
    after: str
    tests: str = ""
    """Arguments of pytest that select what finds it."""

    def lines(self, root: Path) -> tuple[Path, list[str], int]:
        """Return the file, its lines, and the index of the line to change.

        Raises:
            LookupError: There is no such line any more.
        """
        name, _, function = self.place.partition("::")
        lines = (root / name).read_text().splitlines(keepends=True)
        first, last = _functions(ast.parse("".join(lines)))[function]
        for index in range(first - 1, last):
            if lines[index].strip() == self.before:
                return root / name, lines, index
        raise LookupError(f"{self.place} has no line {self.before!r}: give this mutant the line that stands there now")

    def run(self, root: Path, tests: str) -> str:
        """Change the line, run the tests, and put the line back."""
        path, lines, index = self.lines(root)
        indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        path.write_text("".join([*lines[:index], f"{indent}{self.after}\n", *lines[index + 1 :]]))
        try:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
            ended = subprocess.run(command, cwd=root, env=_environment(root), capture_output=True, text=True)
        finally:
            path.write_text("".join(lines))
        return {0: LIVES, 1: FOUND}.get(ended.returncode, WITHOUT_A_TEST)


MUTANTS: tuple[Mutant, ...] = ()


def _environment(root: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def _functions(tree: ast.Module) -> dict[str, tuple[int, int]]:
    """Return the lines of each function of a file by its qualified name, and of the whole file under ""."""
    found = {"": (1, max((node.end_lineno or 1) for node in tree.body))}

    def visit(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{above}{child.name}"
                found[name] = (child.lineno, child.end_lineno or child.lineno)
                visit(child, f"{name}.")

    visit(tree, "")
    return found


# -- what can be changed in a line -------------------------------------------------------------------------------------


def changes(source: str, name: str) -> Iterator[Mutant]:
    """Yield the mutants of a file: conditions negated, whole numbers one larger, statements dropped."""
    lines, tree = source.splitlines(), ast.parse(source)
    functions = sorted(_functions(tree).items(), key=lambda item: (item[1][1] - item[1][0], -len(item[0])))
    for node in filter(_is_on_one_line, ast.walk(tree)):
        number = node.lineno  # type: ignore[attr-defined]
        place = next(function for function, (first, last) in functions if first <= number <= last)
        changed = _changed(node, lines[number - 1])
        if place and changed is not None:
            yield Mutant(f"{name}::{place}", lines[number - 1].strip(), changed.strip())


def _is_on_one_line(node: ast.AST) -> bool:
    return getattr(node, "lineno", 0) == getattr(node, "end_lineno", None)


def _changed(node: ast.AST, line: str) -> str | None:
    """Return the line with a changed node, or None for a node of which there is nothing to change."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)):
        return "pass"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _replaced(line, node, str(node.value + 1))
    if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        return _replaced(line, node, f"(not ({_text(line, node)}))")
    return None


def _text(line: str, node: ast.expr) -> str:
    return line.encode()[node.col_offset : node.end_col_offset].decode()


def _replaced(line: str, node: ast.expr, text: str) -> str:
    encoded = line.encode()
    return (encoded[: node.col_offset] + text.encode() + encoded[node.end_col_offset :]).decode()


def drawn(root: Path, seed: int, number: int) -> list[Mutant]:
    """Draw mutants: each file of `DRAWN_FROM` as often as the others, each of its changes likewise."""
    generator = random.Random(seed)
    files = sorted({path for pattern in DRAWN_FROM for path in root.glob(pattern)})
    chosen = dict[Mutant, None]()
    while len(chosen) < number:
        path = generator.choice(files)
        if found := list(changes(path.read_text(), str(path.relative_to(root)))):
            chosen[generator.choice(found)] = None
    return list(chosen)


# -- running them ------------------------------------------------------------------------------------------------------


def copied(into: Path) -> Path:
    """Copy what git tracks, links as links."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name, follow_symlinks=False)
    return into


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("what", nargs="*", help="draw SEED NUMBER; without it the mutants of the list")
    parser.add_argument("--tests", help="arguments of pytest instead of each mutant's own tests")
    options = parser.parse_args(argv)
    mutants = list(MUTANTS)
    if options.what:
        mutants = drawn(ROOT, int(options.what[1]), int(options.what[2]))
        if options.tests is None:
            print(*mutants, sep="\n")
            return 0
    with tempfile.TemporaryDirectory() as folder:
        return _report(mutants, copied(Path(folder)), options.tests)


def _report(mutants: list[Mutant], root: Path, tests: str | None) -> int:
    """Run the mutants, say of each what became of it, and return 1 if one was not found."""
    results, began = list[str](), time.monotonic()
    for mutant in mutants:
        results.append(mutant.run(root, tests or mutant.tests))
        print(f"{results[-1]}: {mutant.place}: {mutant.before}  ->  {mutant.after}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{results.count(FOUND)} of {len(results)} were found, in {minutes:.1f} minutes")
    return int(results.count(FOUND) < len(results))


if __name__ == "__main__":
    sys.exit(main())
