"""`trainer migrate`: rewrite a project of Lightning's to this package, and list what a person must decide."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path

from trainer.checkpoint.disk import atomic_file
from trainer.cli.main import usage_error
from trainer.cli.migrate.names import RENAMED, Finding, lightning_root
from trainer.cli.options import CommandParser, reports_errors
from trainer.errors import printable, require_package

EXAMPLES = """\
What is rewritten: imports of `lightning`, `lightning.pytorch`, `pytorch_lightning`; LightningModule and
LightningDataModule; arguments of earlier versions that only have another name; `class_path:` and `_target_:` in YAML;
`model:`, `seed_everything:` and `dict_kwargs:` of LightningCLI's files, also in JSON; the cells of notebooks.
What changes in meaning stands in docs/migrating.md.

examples:
  trainer migrate .                 show what would change, as a diff
  trainer migrate . --write         change the files
  trainer migrate train.py configs/trainer.yaml

exit codes: 0 done, 1 a file could not be read or written, 2 wrong usage
"""
YAML = (".yaml", ".yml")
READ = (".py", ".ipynb", *YAML)
"""Files of a folder that are read, beside requirements."""
SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv", "env", "lightning_logs", "wandb"}
MENTIONED = re.compile(rb"\b(pytorch_lightning|lightning|lightning_fabric|trainer)\b")
REQUIREMENT = re.compile(r"(?<![\w.\-/])(pytorch[-_]lightning|lightning)(\[[\w,-]+\])?\s*(?=[=<>~!;,\s\"']|$)")
REQUIREMENTS = re.compile(r"(.*requirements.*\.(txt|in)|pyproject\.toml|setup\.(py|cfg)|environment.*\.ya?ml|Pipfile)")
OF_CLI = re.compile(
    rb"\b(class_path|init_args|dict_kwargs|seed_everything)\b|^(model|data|trainer|optimizer|lr_scheduler)\.\w", re.M
)
"""Words of LightningCLI's files, which need not name Lightning."""
UNREADABLE = (ValueError, LookupError, RecursionError, OSError)
"""Errors by files that are not Python, YAML or a notebook, or not in their encoding."""
EXPORTED = re.compile(rb"^\s*from\s+(\S+)\s+import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)


@reports_errors
def run(arguments: list[str]) -> int:
    """Show or make the changes. Returns the exit code."""
    words = "Rewrite a project of Lightning's to this package, and list what a person must decide."
    parser = CommandParser(prog="trainer migrate", description=words, epilog=EXAMPLES)
    words = "a Python, YAML or JSON file, or a folder (of Python and YAML)"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=words)
    parser.add_argument("--write", action="store_true", help="change the files; default: show a diff")
    options = parser.parse(arguments)
    require_package("libcst", "trainer migrate")
    import libcst
    import yaml

    missing = [path for path in options.paths if not os.path.exists(path)]
    problems = [f"{path}: there is no such file or folder" for path in missing]
    files = dict.fromkeys(chain.from_iterable(_files(Path(path)) for path in options.paths if path not in missing))
    contents = _read(files, problems)
    kept = _names_taken_from_others(contents.values())
    sources = {file: source for file, source in contents.items() if _names_lightning(file, source)}
    changed, places = 0, []
    for file, source in sources.items():
        try:
            new, findings = _migrated(file, source, kept)
            if new != source:
                _write(file, new) if options.write else _show(file, source, new)
                changed += 1
            places += [f"{file}:{one.line}: {one.what}: {one.todo}" for one in findings]
        except (*UNREADABLE, libcst.ParserSyntaxError, yaml.YAMLError) as error:
            if b"lightning" in source:  # else it is not a file of Lightning's
                problems.append(f"{file}: not changed: {' '.join(str(error).split())}")
    _report(len(sources), changed, places, options.write)
    for problem in problems:
        usage_error(problem)
    return 2 if missing else 1 if problems else 0


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a folder that may name Lightning, or the file itself."""
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):  # of a file, nothing
        folders[:] = sorted(name for name in {*folders} - SKIPPED if not name.startswith("."))
        files = [Path(folder, name) for name in sorted(names)]
        yield from (one for one in files if one.suffix in READ or REQUIREMENTS.fullmatch(one.name))


def _names_lightning(file: Path, source: bytes) -> bool:
    """Whether a file names Lightning or this package, or is one of LightningCLI; any file of JSON, which is given."""
    if MENTIONED.search(source) or REQUIREMENTS.fullmatch(file.name) or file.suffix == ".json":
        return True
    return file.suffix in YAML and OF_CLI.search(source) is not None


def _read(files: Iterable[Path], problems: list[str]) -> dict[Path, bytes]:
    """Return the contents of the files."""
    found = {}
    for file in files:
        try:
            found[file] = file.read_bytes()
        except OSError as error:
            problems.append(f"{file}: {error.strerror or error}")
    return found


def _names_taken_from_others(sources: Iterable[bytes]) -> set[str]:
    """Return the names that a file of the project imports from another file of it, which keep their old names."""
    taken: set[str] = set()
    for source in sources:
        for module, names in EXPORTED.findall(source):
            if lightning_root(module.decode(errors="replace")) is None:
                taken |= {name for name in RENAMED if re.search(rf"\b{name}\b".encode(), names)}
    return taken


def _migrated(file: Path, source: bytes, kept: Collection[str]) -> tuple[bytes, list[Finding]]:
    """Return the new contents of a file, and what a person must decide.

    Raises:
        ValueError, LookupError, RecursionError, ParserSyntaxError, YAMLError: the file cannot be read.
    """
    from trainer.cli.migrate.python_files import migrate_python
    from trainer.cli.migrate.yaml_files import migrate_yaml

    if REQUIREMENTS.fullmatch(file.name):
        lines = source.decode(errors="replace").splitlines()
        named = [(number, REQUIREMENT.search(line.partition("#")[0])) for number, line in enumerate(lines, 1)]
        words = "where this is a requirement, require this package instead"
        return source, [Finding(number, match[1], words) for number, match in named if match is not None]
    if file.suffix == ".py":
        return migrate_python(source, kept if file.name != "__init__.py" else RENAMED)
    if file.suffix == ".ipynb":
        return _notebook(source, kept)
    text, found = migrate_yaml(source.decode("utf-8"))
    return text.encode("utf-8"), found


def _notebook(source: bytes, kept: Collection[str]) -> tuple[bytes, list[Finding]]:
    """Rewrite the cells of a notebook as one file, so that an import in one cell counts in the others."""
    from trainer.cli.migrate.python_files import migrate_python

    notebook = json.loads(source)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    texts = ["".join(cell["source"]) for cell in cells]
    python = [_MAGIC.sub(r"\1pass  # \2", text) for text in texts]
    masked = "".join(f"{_CELL}{number}\n{text}\n" for number, text in enumerate(python))
    new, found = migrate_python(masked.encode(), kept)
    parts = re.split(rf"^{_CELL}\d+\n", new.decode(), flags=re.MULTILINE)[1:]
    for cell, before, part in zip(cells, texts, parts, strict=True):
        after = _MASKED.sub(r"\1\2", part.removesuffix("\n"))
        if after != before:
            cell["source"] = after.splitlines(keepends=True)
    lines = masked.splitlines()
    of_cell = [sum(line.startswith(_CELL) for line in lines[: one.line]) for one in found]
    found = [one._replace(what=f"cell {number}: {one.what}") for one, number in zip(found, of_cell, strict=True)]
    same = new.decode() == masked
    return source if same else (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode(), found


_CELL = "# -- cell "
_MAGIC, _MASKED = re.compile(r"^(\s*)([%!?].*)$", re.MULTILINE), re.compile(r"^(\s*)pass  # ([%!?].*)$", re.MULTILINE)
"""Lines of IPython, which are no Python, and what stands for them while a notebook is read."""


def _write(file: Path, new: bytes) -> None:
    """Put new contents in the place of a file at once, with its permissions."""
    place = file.resolve()
    with atomic_file(place) as temporary:
        temporary.write_bytes(new)
        shutil.copymode(place, temporary)
    print(f"written: {printable(str(file))}")


def _show(file: Path, old: bytes, new: bytes) -> None:
    before, after = (text.decode("utf-8", errors="replace").splitlines(keepends=True) for text in (old, new))
    name = file.as_posix().lstrip("/")
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
        print(line.rstrip("\n"))


def _report(files: int, changed: int, places: list[str], write: bool) -> None:
    if places:
        print("\nTo decide by hand:", *(f"  {printable(place)}" for place in places), sep="\n")
        print("Or change nothing: `trainer run-as-lightning SCRIPT` runs a script of Lightning's as it is.")
    done = "changed" if write else "would change with --write"
    print(f"\nfiles that name Lightning or this package: {files}; {done}: {changed}; to decide by hand: {len(places)}")
