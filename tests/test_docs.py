"""Every snippet of the README and the docs runs: Python blocks, commands, and config files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.helpers.examples import restored_imports
from tests.helpers.processes import ROOT, fork_python

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SHORTER = "--trainer.max_epochs 1 --trainer.limit_train_batches 3 --trainer.limit_val_batches 3"

QUICK = {"--help", "--print-config", "--print", "--dry-run", "checkpoint", "config", "env", "estimate", "init"}
QUICK |= {"runs", "plot", "help", "schema", "completion", "migrate"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def names(pages: list[Path]) -> list[str]:
    return [page.relative_to(ROOT).as_posix().removeprefix("docs/") for page in pages]


PYTHON_PAGES = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=names(PYTHON_PAGES))
def test_python_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "snippets.py"
    script.write_text("\n\n".join(blocks(page, "python")))
    fork_python(script, cwd=tmp_path).wait().check()


BEFORE = 'python title="before: Accelerate"'


@pytest.mark.parametrize(("name", "package"), [("Lightning", "pytorch_lightning"), ("transformers", "transformers")])
def test_what_comes_from_elsewhere_prints_before_and_after_the_same(name: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    page = ROOT / "docs" / "migrating.md"
    (script,) = blocks(page, f'python title="before: {name}"')
    shared, *after = blocks(page, "python")
    printed = []
    for number, lines in enumerate(([shared, script], [shared, *after])):
        (tmp_path / f"{number}.py").write_text("\n\n".join(lines))
        done = fork_python(tmp_path / f"{number}.py", cwd=tmp_path).wait().check()
        printed.append([line for line in done.stdout.splitlines() if line.startswith(f"{name}: ")])
    assert len(printed[0]) == 1
    assert printed[0] == printed[1]


def test_scripts_of_accelerate_print_before_and_after_the_same(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    page = ROOT / "docs" / "from-accelerate.md"
    shared = [block for block in blocks(page, "python") if block.startswith(("import ", "from transformers"))]
    scripts = blocks(page, BEFORE)
    assert len(scripts) == 3
    printed = []
    for number, script in enumerate(scripts):
        (tmp_path / f"{number}.py").write_text("\n\n".join([*shared, script]))
        done = fork_python(tmp_path / f"{number}.py", cwd=tmp_path).wait().check()
        printed.append(done.stdout.splitlines())
    (tmp_path / "after.py").write_text("\n\n".join(blocks(page, "python")))
    after = fork_python(tmp_path / "after.py", cwd=tmp_path).wait().check().stdout.splitlines()
    started = "Training started!"
    for lines in printed:
        lines = [line for line in lines if line != started]
        assert lines
        for line in lines:
            assert after.count(line) == 2, f"{line!r} is not printed by both ways: {after}"


def trainer_commands(page: Path) -> list[str]:
    lines = "".join(blocks(page, "bash")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith(".venv/bin/trainer")]


COMMAND_PAGES = [page for page in PAGES if trainer_commands(page)]


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=names(COMMAND_PAGES))
def test_commands_run(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands run in the order of the page, in one directory; trainings are shortened."""
    from trainer.cli.main import main

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in trainer_commands(page):
        words = shlex.split(command)[1:]
        # In this process, where the command is quick and changes nothing.
        if QUICK & set(words):
            with restored_imports():
                assert main(words) == 0, capsys.readouterr().err
            continue
        if "max_epochs 2" not in command and "max_steps" not in command and "doctor" not in words:
            words += shlex.split(SHORTER)
        fork_python("-m", "trainer", *words, cwd=tmp_path).wait().check()


def test_pages_have_commands() -> None:
    assert {"README.md", "cli.md"} <= set(names(COMMAND_PAGES))
    assert len(trainer_commands(ROOT / "README.md")) > 2


def test_commands_of_tutorials_are_run() -> None:
    """Here, or with the commands of the examples, which tests/examples runs: tutorials begin with copies of these."""
    from trainer.cli.main import main

    examples = "".join(blocks(ROOT / "examples" / "README.md", "bash")).splitlines()
    for page in (ROOT / "docs" / "tutorials").glob("*.md"):
        copies: dict[str, str] = {}
        for line in "".join(blocks(page, "bash")).splitlines():
            match line.split():
                case ["trainer", "init", "--template", template, folder]:
                    assert main(["init", "--template", template, folder]) in (0, None)
                    copies[f"{folder}/"] = f"examples/{template}/"
                case words if not line.startswith(".venv/bin/trainer"):
                    paths = [word for word in words if word.startswith((*copies,))]
                    assert all(Path(path).exists() for path in paths), page.name
                    for copy, example in copies.items():
                        line = line.replace(copy, example)
                    assert line in examples, page.name


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_yaml_blocks_are_configs(page: Path) -> None:
    """Each block is merged into the digits example and accepted, without a run."""
    from trainer.cli.main import main

    Path("examples").symlink_to(ROOT / "examples")
    for number, block in enumerate(blocks(page, "yaml")):
        assert isinstance(yaml.safe_load(block), dict)
        more = Path(f"more-{number}.yaml")
        more.write_text(block)
        config = str(ROOT / "examples" / "digits" / "config.yaml")
        with restored_imports():
            assert main(["fit", "--config", config, str(more), "--print-config"]) in (0, None)


def test_make_targets_in_the_readme_exist() -> None:
    targets = re.findall(r"^make ([a-z-]+)", "".join(blocks(ROOT / "README.md", "bash")), flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets[:2] == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in targets)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target.replace("\n", " ")).exists(), f"{page.name}: {target}"
