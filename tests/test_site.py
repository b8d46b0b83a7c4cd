"""The site: every page is in its navigation; links out of docs/ become links between pages."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import yaml

import trainer
import trainer.callbacks
import trainer.strategies
import trainer.testing

ROOT = Path(__file__).parent.parent


LISTS = ("lightning-names.md", "accelerate-names.md")
"""Pages to look names up in, to which `migrating.md` leads."""


def pages_of(entry: Any) -> set[str]:
    if isinstance(entry, str):
        return {entry}
    return set().union(*(pages_of(part) for part in (entry.values() if isinstance(entry, dict) else entry)))


def public_names() -> set[str]:
    """Return the names that users import, as `trainer.callbacks.Timer`, but for aliases of the same thing."""
    names = {f"trainer.{name}" for name in trainer.__all__ if name != "__version__"}
    names |= {f"trainer.testing.{name}" for name in trainer.testing.__all__}
    for package in (trainer.callbacks, trainer.strategies):
        things = {name: thing for name, thing in vars(package).items() if callable(thing) and not name.startswith("_")}
        names |= {f"{package.__name__}.{name}" for name, thing in things.items() if not hasattr(trainer, name)}
    return names


def test_the_navigation_lists_every_page() -> None:
    listed = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    listed |= {page for page in LISTS if f"({page})" in (ROOT / "docs" / "migrating.md").read_text()}
    for page in sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")):
        assert page in listed, f"add a line `- A short title: {page}` under `nav:` in mkdocs.yml"


def test_what_pages_link_to_elsewhere_is_on_the_site(tmp_path: Path) -> None:
    files = {
        "README.md": "[first](docs/first.md)",
        "docs/first.md": "[all](../README.md), [example](../examples/one), [here](more/deep.md#part)",
        "docs/more/deep.md": "[code](../../examples/one/code.py), [elsewhere](https://example.org)\n"
        "<!-- file: ../../examples/one/code.py -->\n",
        "examples/one/README.md": "[config](run.yaml), [back](../../docs/first.md#top)",
        "examples/one/run.yaml": "a: 1\n",
        "examples/one/code.py": "text = '[not](README.md)'\n",
        "examples/two.py": "nobody links here",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "docs" / "collect_pages.py").write_text((ROOT / "docs" / "collect_pages.py").read_text())
    runpy.run_path(str(tmp_path / "docs" / "collect_pages.py"), run_name="__main__")

    built = tmp_path / "build" / "pages"
    pages = {path.relative_to(built).as_posix(): path.read_text() for path in built.rglob("*") if path.is_file()}
    assert pages == {
        "first.md": "[all](index.md), [example](examples/one/README.md), [here](more/deep.md#part)",
        "more/deep.md": "[code](../examples/one/code.py.md), [elsewhere](https://example.org)\n"
        "````python\ntext = '[not](README.md)'\n````\n",
        "examples/one/README.md": "[config](run.yaml.md), [back](../../first.md#top)",
        "examples/one/run.yaml.md": "# examples/one/run.yaml\n\n````yaml\na: 1\n````\n",
        "examples/one/code.py.md": "# examples/one/code.py\n\n````python\ntext = '[not](README.md)'\n````\n",
    }


def test_the_reference_has_every_public_name() -> None:
    collected = runpy.run_path(str(ROOT / "docs" / "collect_pages.py"))
    pages = [collected["as_page"](page) for page in (ROOT / "docs" / "reference").glob("*.md")]
    described = {name for page in pages for name in re.findall(r"^::: (\S+)", page, flags=re.MULTILINE)}
    others = {"trainer.LightningModule", "trainer.LightningDataModule"}  # other names of classes that are described
    assert others <= set(re.findall(r"`(trainer\.Lightning\w+)`", "".join(pages)))
    assert public_names() - described == others, "add `::: trainer.Name` to a page of docs/reference"
    assert "`gradient_clip_val` | `None` |" in collected["arguments"]()


def test_the_reference_has_a_page_for_every_command() -> None:
    from trainer.cli.main import COMMANDS

    collected = runpy.run_path(str(ROOT / "docs" / "collect_pages.py"))
    pages = collected["pages_of_commands"]()
    assert [*pages] == [*COMMANDS] == re.findall(r"\(commands/([a-z-]+)\.md\)", collected["commands"]())
    parts = {}
    for name, page in pages.items():
        sections = dict(re.findall(r"^##? trainer (.*?)\n\n````text\n(.*?)````", page, flags=re.MULTILINE | re.DOTALL))
        for call, text in sections.items():
            assert text.startswith(f"usage: trainer {call} "), call
        parts[name] = [call.removeprefix(f"{name} ") for call in sections if call != name]
    assert parts["runs"] == ["ls"]
    assert parts["checkpoint"] == ["ls", "show", "verify", "export", "import"]


def test_the_picture_of_the_loop_has_the_names_of_hooks() -> None:
    words = set(re.findall(r"\bon_\w+", (ROOT / "docs" / "pictures" / "loop.svg").read_text()))
    assert len(words) > 15
    assert all(hasattr(trainer.Callback, word) or hasattr(trainer.TrainModule, word) for word in words)


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    trees = [
        ast.parse(path.read_text())
        for folder in ("trainer", "strategies", "callbacks")
        for path in python_files(folder)
    ]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    everything = "\n".join(text for text in texts if isinstance(text, str))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \| ", page, flags=re.MULTILINE)
    assert len(messages) > 10
    for part in (part.strip() for message in messages for part in message.split("...")):
        assert part in everything, f"docs/troubleshooting.md: no message has the words {part!r}"


def python_files(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))
