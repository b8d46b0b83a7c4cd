"""`trainer init` makes a copy of an example that works by itself, and changes no file of the user."""

from __future__ import annotations

import shlex
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, fork_python, run_python
from tests.helpers.project import Command, done
from trainer.cli import init
from trainer.cli.init import FOLDER, NEEDS, TEMPLATES


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not {"__pycache__", "runs"} & set(path.parts))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


SHORTER = {
    "trainer fit": "--trainer.max_epochs 1 --trainer.limit_train_batches 3 --trainer.val_check_interval 1.0",
    "trainer test": "",
    "python train.py": "--max-epochs 1",
    "python own_callback.py": "",
    "python sample.py": "--length 5",
    # The forked process has imported DeepSpeed, which imports the clients of trackers, and they a plugin of pytest.
    "pytest": "-p no:cacheprovider -W error -W ignore::pytest.PytestAssertRewriteWarning",
}
"""The beginning of a command in a README: what makes it short."""


def commands_of(readme: Path) -> list[list[str]]:
    """Return the indented commands of an example's README, shortened, without those on the reader's own data."""
    lines = [line.strip() for line in readme.read_text().splitlines() if line.startswith("    ")]
    found = []
    for line in lines:
        if "my_texts" not in line and "my.csv" not in line:
            start = next(start for start in SHORTER if line.startswith(start))
            message = shlex.split(f"{line} {SHORTER[start]}")
            found.append(message[1:] if message[0] == "python" else ["-m", *message])
    return found


def test_every_folder_is_a_template() -> None:
    folders = (path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__")
    assert sorted(folders) == sorted(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_commands_of_the_readme_work_in_the_copy(tmp_path: Path, name: str) -> None:
    for module in NEEDS.get(name, {}):
        pytest.importorskip(module)
    printed = run_python("-m", "trainer", "init", "--template", name, "my project", cwd=tmp_path).check().stdout
    project = tmp_path / "my project"
    assert files_of(project) == files_of(FOLDER / name)
    files = {"README.md", "config.yaml", "data.py", "module.py", f"test_{name.replace('-', '_')}.py"}
    assert files <= set(files_of(project))
    assert all(file in printed for file in files_of(project))
    assert "  cd 'my project'\n  trainer fit --config config.yaml\n  pytest\n" in printed

    # Only the trainer is on the path, as when it is installed.
    (path := tmp_path / "installed").mkdir()
    (path / "trainer").symlink_to(ROOT / "trainer")
    commands = commands_of(FOLDER / name / "README.md")
    assert commands[0][:3] == ["-m", "trainer", "fit"]
    assert commands[-1][:2] == ["-m", "pytest"]
    for message in commands:
        result = fork_python(*message, cwd=project, env={"PYTHONPATH": str(path)}).wait().check()
        assert result.stdout.strip()
        if message == commands[0]:
            assert "after 3 steps:" in result.stdout
            assert f"checkpoints:    runs/{name}/version_0/checkpoints" in result.stdout
            run_python("-m", "trainer", "checkpoint", "verify", f"runs/{name}/version_0", cwd=project).check()
    assert " passed" in result.stdout


# -- what is refused ---------------------------------------------------------------------------------------------------


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


def test_a_missing_package_is_reported(command: Command, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "find_spec", lambda name: None)
    out, _ = done(command("init", "--template", "digits", "new"))
    assert "It needs packages that are not installed: pip install scikit-learn torchmetrics tensorboard pytest" in out
    assert "not installed: pip install pytest\n" in command("init", "--template", "gpt", "other")[1]
    monkeypatch.setattr(init, "find_spec", find_spec)
    assert "pip install" not in command("init", "--template", "gpt", "complete")[1]


def test_ctrl_c_ends_with_a_word(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "find_spec", lambda name: signal.raise_signal(signal.SIGINT))
    code, _, err = command("init", "--template", "digits", "new")
    assert (code, err) == (130, "interrupted\n")


def test_the_templates_are_listed(command: Command) -> None:
    out, _ = done(command("init", "--list"))
    assert [line.split()[0] for line in out.splitlines()] == list(TEMPLATES)


def test_it_needs_no_torch(tmp_path: Path) -> None:
    program = "import sys\nsys.modules['torch'] = None\nfrom trainer.__main__ import main\nsys.exit(main())\n"
    run_python(program, "init", "--template", "text-classification", "new", cwd=tmp_path).check()
    assert files_of(tmp_path / "new") == files_of(FOLDER / "text-classification")
