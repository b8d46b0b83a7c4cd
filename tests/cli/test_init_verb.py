"""`trainer init`: each template is a project that trains, with a test that passes; nothing of the user's is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import run_python
from tests.helpers.project import Command
from trainer.cli import init
from trainer.cli.init import FOLDER, NEEDS, TEMPLATES


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_every_folder_is_a_template() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(TEMPLATES)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_project_trains_and_its_own_test_passes(tmp_path: Path, name: str) -> None:
    for module, _ in [NEEDS[name]] if name in NEEDS else []:
        pytest.importorskip(module)
    said = run_python("-m", "trainer", "init", "--template", name, "my project", cwd=tmp_path).check().stdout
    project = tmp_path / "my project"
    assert files_of(project) == files_of(FOLDER / name)
    assert {"README.md", "config.yaml", "data.py", "module.py", f"tests/test_{name.replace('-', '_')}.py"} <= set(
        files_of(project)
    )
    assert all(file in said for file in files_of(project))
    assert "  cd 'my project'\n  trainer fit --config config.yaml\n  pytest\n" in said

    # What it has just said, and a shorter training.
    short = ("--trainer.max_steps", "3", "--trainer.limit_val_batches", "2", "--trainer.enable_progress_bar", "false")
    fit = run_python("-m", "trainer", "fit", "--config", "config.yaml", *short, cwd=project).check()
    assert "after 3 steps:" in fit.stdout
    assert "checkpoints:    runs/version_0/checkpoints" in fit.stdout
    run_python("-m", "trainer", "checkpoint", "verify", "runs/version_0", cwd=project).check()
    if (project / "sample.py").exists():
        assert run_python("sample.py", cwd=project).check().stdout.strip()
    tested = run_python("-m", "pytest", "-p", "no:cacheprovider", "-W", "error", cwd=project).check()
    assert " passed" in tested.stdout


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--template NAME is missing: trainer init --template digits my_digits"),
        (["new"], "--template NAME is missing"),
        (["--template", "digits"], "DIR, the folder to make is missing"),
        (["--template", "digit", "new"], "Did you mean 'digits'?"),
        (["--template", "../digits", "new"], "unknown template"),
        (["--template", "gpt", "mymodel.py"], "mymodel.py is a file: give the name of a new folder"),
        (["--template", "gpt", "."], "is not empty, and nothing in it is replaced"),
        (["--template", "gpt", "mymodel.py/new"], "cannot be written"),
        (["--template", "gpt", "new", "newer"], "unrecognized arguments: newer"),
    ],
)
def test_wrong_usage_writes_nothing(command: Command, project: Path, arguments: list[str], words: str) -> None:
    before = files_of(project)
    code, out, err = command("init", *arguments)
    assert code == 2
    assert words in err
    assert out == ""
    assert files_of(project) == before
    assert not (project / "new").exists()


def test_an_empty_folder_and_one_in_a_new_folder_are_taken(command: Command, project: Path) -> None:
    (project / "empty").mkdir()
    for folder in ("empty", "a/b"):
        assert command("init", "--template", "gpt", folder)[0] == 0
        assert files_of(project / folder) == files_of(FOLDER / "gpt")


def test_a_read_only_installation_gives_files_that_can_be_changed(
    command: Command, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = project / "installed" / "gan"
    source.mkdir(parents=True)
    (source / "module.py").write_text("")
    (source / "module.py").chmod(0o444)
    monkeypatch.setattr(init, "FOLDER", source.parent)
    assert command("init", "--template", "gan", "new")[0] == 0
    assert (project / "new" / "module.py").stat().st_mode & 0o200


def test_a_missing_package_is_told(command: Command, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "find_spec", lambda name: None)
    code, out, _ = command("init", "--template", "digits", "new")
    assert code == 0
    assert "Its data comes with scikit-learn, which is not installed: pip install scikit-learn" in out
    assert "pip install" not in command("init", "--template", "gpt", "other")[1]


def test_the_templates_are_listed(command: Command) -> None:
    code, out, _ = command("init", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(TEMPLATES)


def test_it_needs_no_torch(tmp_path: Path) -> None:
    program = "import sys\nsys.modules['torch'] = None\nfrom trainer.__main__ import main\nsys.exit(main())\n"
    run_python(program, "init", "--template", "text-classification", "new", cwd=tmp_path).check()
    assert files_of(tmp_path / "new") == files_of(FOLDER / "text-classification")
