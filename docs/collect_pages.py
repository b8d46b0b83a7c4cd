"""Collect the pages of the site in build/pages: docs/ as it is, and the files elsewhere that its pages link to."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
MARK = re.compile(r"^<!-- (\w+) -->$", flags=re.MULTILINE)
INCLUDED = re.compile(r"^<!-- file: (\S+) -->$", flags=re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml"}


def collect() -> None:
    """Write a page for each page of docs/, and for each file of the repository that these lead to."""
    shutil.rmtree(PAGES, ignore_errors=True)
    waiting = [path for path in DOCS.rglob("*") if path.suffix in (".md", ".svg", ".png", ".css", ".ipynb")]
    seen = set(waiting) | {ROOT / "README.md"}  # docs/index.md takes the place of README.md
    while waiting:
        file = waiting.pop()
        page = PAGES / site_path(file)
        page.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".png":
            shutil.copyfile(file, page)
            continue
        page.write_text(as_page(file))
        if file == DOCS / "reference" / "commands.md":
            (page.parent / "commands").mkdir()
            for name, text in pages_of_commands().items():
                (page.parent / "commands" / f"{name}.md").write_text(text)
        linked = linked_files(file)
        waiting += linked - seen
        seen |= linked


def as_page(file: Path) -> str:
    """Return the text of a page: Markdown with links between pages, source files as a block of code."""
    text = file.read_text()
    if file.suffix == ".ipynb":
        return "\n".join(map(_of_cell, json.loads(text)["cells"]))
    if file.suffix in LANGUAGES:
        return f"# {file.relative_to(ROOT).as_posix()}\n\n{_as_code(file)}\n"

    def on_site(link: re.Match[str]) -> str:
        target = linked_file(file, link[1])
        return link[1] if target is None else os.path.relpath(site_path(target), Path(site_path(file)).parent)

    if file.suffix != ".md":
        return text
    text = INCLUDED.sub(lambda mark: _as_code((file.parent / mark[1]).resolve()), LINK.sub(on_site, text))
    return MARK.sub(lambda mark: REFERENCE[mark[1]](), text)


def _as_code(file: Path) -> str:
    return f"````{LANGUAGES[file.suffix]}\n{file.read_text()}````"


def _of_cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    return f"```python\n{source}\n```\n" if cell["cell_type"] == "code" else f"{source}\n"


def linked_files(file: Path) -> set[Path]:
    links = LINK.findall(file.read_text()) if file.suffix == ".md" else []
    return {target for link in links if (target := linked_file(file, link)) is not None}


def linked_file(file: Path, link: str) -> Path | None:
    """Return the file of this repository that a link leads to, for a folder its README; None for other links."""
    target = Path(os.path.normpath(file.parent / link))
    target = target / "README.md" if target.is_dir() else target
    return target if target.is_file() and ROOT in target.parents else None


def site_path(file: Path) -> str:
    """Return the path of a file's page, relative to the root of the site."""
    if file == ROOT / "README.md":
        return "index.md"
    path = file.relative_to(DOCS if DOCS in file.parents else ROOT).as_posix()
    return f"{path}.md" if file.suffix in LANGUAGES else path.replace(".ipynb", ".md")


# -- what the reference says of tables: `<!-- loggers -->` on a page stands for all loggers ----------------------------


def arguments() -> str:
    """Return a table of the Trainer's arguments, with the help that `trainer fit --help` shows."""
    from dataclasses import fields

    from trainer.settings import Settings

    rows = [(field.name, repr(field.default), field.metadata["help"]) for field in fields(Settings)]
    lines = [f"| `{name}` | `{default}` | {text.replace('|', '&#124;')} |" for name, default, text in rows]
    return "\n".join(["| argument | default | |", "|---|---|---|", *lines])


def callbacks() -> str:
    return described("trainer.callbacks", sorted(set(_of_callbacks()) - set(_loggers())))


def loggers() -> str:
    return described("trainer.callbacks", _loggers())


def _of_callbacks() -> list[str]:
    """Return the names of `trainer.callbacks`, but for the base classes, which the pages describe themselves."""
    import trainer.callbacks

    names = [name for name, thing in vars(trainer.callbacks).items() if callable(thing) and not name.startswith("_")]
    return [name for name in names if name not in ("Callback", "Logger", "Tracker")]


def _loggers() -> list[str]:
    from trainer.callbacks import CALLBACKS, Logger

    return [name for name in _of_callbacks() if name in CALLBACKS and issubclass(CALLBACKS[name], Logger)]


def strategies() -> str:
    from trainer.strategies import STRATEGIES

    lines = [
        f"| `{name}` | [{kind.__name__}](#trainer.strategies.{kind.__name__}) |" for name, kind in STRATEGIES.items()
    ]
    table = "\n".join(["| `strategy=` | class |", "|---|---|", *lines])
    return f"{table}\n\n{described('trainer.strategies', [kind.__name__ for kind in STRATEGIES.values()])}"


def precisions() -> str:
    from trainer.names.aliases import SHORT_PRECISIONS
    from trainer.precision import PRECISIONS

    def row(name: str) -> str:
        one = PRECISIONS[name]
        short = ", ".join(f"`{short}`" for short, full in SHORT_PRECISIONS.items() if full == name)
        computes = str(one.autocast or one.weights).removeprefix("torch.")
        computes += ", matrix products of linear layers in 8 bits" if one.float8 is not None else ""
        weights = str(one.weights).removeprefix("torch.")
        return f"| `{name}` | {short} | {weights} | {computes} | {'yes' if one.loss_scaling else ''} |"

    head = ["| `precision=` | also | weights | computes in | loss scaling |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(row, PRECISIONS)])


def commands() -> str:
    """Return a table of the commands, with links to their pages."""
    from trainer.cli.main import COMMANDS

    lines = [f"| [trainer {name}](commands/{name}.md) | {summary} |" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["| command | |", "|---|---|", *lines])


def pages_of_commands() -> dict[str, str]:
    """Return a page for each command: its help, and that of each subcommand below a heading of its own."""
    from trainer.cli.checkpoint.command import SUBCOMMANDS
    from trainer.cli.main import COMMANDS

    parts = {"checkpoint": [*SUBCOMMANDS], "runs": ["ls"]}
    pages = {}
    for name in COMMANDS:
        further = [f"## trainer {name} {part}\n\n{_help([name, part])}" for part in parts.get(name, ())]
        explained = "[All commands](../commands.md), and [examples](../../cli.md).\n"
        pages[name] = "\n".join([f"# trainer {name}\n\n{_help([name])}", *further, explained])
    return pages


def _help(call: list[str]) -> str:
    from trainer.cli.main import main

    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        main([*call, "--help"])
    return f"````text\n{text.getvalue()}````\n"


def testing() -> str:
    import trainer.testing

    return described("trainer.testing", trainer.testing.__all__)


def described(package: str, names: list[str]) -> str:
    """Return directives that mkdocstrings replaces with signatures and docstrings."""
    return "\n\n".join(f"::: {package}.{name}" for name in sorted(set(names)))


TABLES = (arguments, callbacks, commands, loggers, strategies, precisions, testing)
REFERENCE = {make.__name__: make for make in TABLES}

if __name__ == "__main__":
    collect()
