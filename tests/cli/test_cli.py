"""The commands: help, the resolved configuration, and real runs."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from shutil import rmtree

import pytest
import yaml

from tests.helpers.processes import Result, fork_python
from tests.helpers.project import Command, done, loaded, refused
from trainer.config.files import read_value

RUN = "module: {class_path: mymodel.py:Net, init_args: {lr: 1e-2}}\ndata: mymodel.py:Data\n"
QUIET = "trainer: {max_epochs: 1, seed: 1, enable_progress_bar: false, enable_model_summary: false}\n"
SCRIPT = "import sys\nfrom trainer.__main__ import main\nsys.exit(main())\n"
"""Source of the installed command."""


def resolved(command: Command, *arguments: str) -> dict[str, object]:
    out, _ = done(command("fit", *arguments, "--print-config"))
    loaded: dict[str, object] = yaml.safe_load(out)
    return loaded


def given(*overrides: str, files: tuple[str, ...] = ()) -> dict[str, object]:
    """Return the arguments of the module of `mymodel.py`."""
    pairs = [overrides[i : i + 2] for i in range(0, len(overrides), 2)]
    configuration = loaded(*files, overrides=[(name, read_value(value, name)) for name, value in pairs])
    _, module, _ = configuration.build()
    arguments: dict[str, object] = module.given  # type: ignore[assignment]
    return arguments


def test_characters_that_the_output_cannot_encode_are_escaped(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*arguments: str) -> str:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
        assert command("fit", "--module", "mymodel.py:Net", "--data", "mymodel.py:Data", *arguments)[0] == 0
        sys.stdout.seek(0)
        return sys.stdout.read()

    root = ("--trainer.default_root_dir", "läufe", "--trainer.max_epochs", "1")
    settings = yaml.safe_load(printed(*root, "--print-config"))["trainer"]
    assert settings["default_root_dir"].endswith("läufe")
    assert r"l\xe4ufe/version_0" in printed(*root, "--trainer.enable_progress_bar", "false")


# -- help ----------------------------------------------------------------------------------------------------------


# -- the resolved configuration ------------------------------------------------------------------------------------


def test_files_and_options_are_laid_over_each_other(command: Command) -> None:
    Path("a.yaml").write_text(
        RUN + "trainer: {max_epochs: 1, callbacks: [{class_path: mymodel.Watcher, patience: 2}]}\n"
    )
    Path("b.json").write_text('{"trainer": {"max_epochs": 2, "precision": "64-true"}}')
    Path("c.toml").write_text("[module.init_args]\nwidth = 3\n")
    options = "--module.lr 1e-4 --trainer.callbacks.0.patience=5 --seed 3 --trainer.strategy ddp "
    options += "--trainer.strategy.find_unused_parameters true --data.batch_size 8"
    here = Path.cwd()
    result = resolved(command, "--config", "a.yaml", "b.json", "--config", "c.toml", *options.split())
    assert result == {
        "module": {"class_path": f"{here}/mymodel.py:Net", "init_args": {"lr": 0.0001, "width": 3}},
        "data": {"class_path": f"{here}/mymodel.py:Data", "init_args": {"batch_size": 8}},
        "trainer": {
            "max_epochs": 2,
            "callbacks": [{"class_path": f"{here}:mymodel.Watcher", "init_args": {"patience": 5}}],
            "precision": "64-true",
            "strategy": {"class_path": "ddp", "init_args": {"find_unused_parameters": True}},
            "seed": 3,
            "default_root_dir": f"{here}/runs",
        },
    }


def test_the_resolved_configuration_gives_itself_from_any_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package" / "deep").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "deep" / "net.py").write_text("from mymodel import Net as Base\nclass Net(Base): pass\n")
    (tmp_path / "elsewhere").mkdir()
    for module in ("package.deep.net.Net", "mymodel.py:Net"):
        first = command("fit", "--module", module, "--module.file", "data/x", "--module.name", "1e-3", "--print-config")
        assert first[0] == 0, first
        assert yaml.safe_load(first[1])["module"]["init_args"]["file"] == str(tmp_path / "data" / "x")
        (tmp_path / "resolved.yaml").write_text(first[1])
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / "elsewhere")
            patch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
            assert command("fit", "--config", "../resolved.yaml", "--print-config") == first


def test_the_order_of_a_class_and_its_arguments_does_not_matter(command: Command) -> None:
    Path("run.yaml").write_text("module: {class_path: mymodel.py:Needy, init_args: {lr: 1, width: 2}}\n")
    one = command("fit", "--config", "run.yaml", "--module.lr", "3", "--module", "mymodel.py:Net", "--print-config")
    two = command("fit", "--config", "run.yaml", "--module", "mymodel.py:Net", "--module.lr", "3", "--print-config")
    assert one == two
    assert yaml.safe_load(one[1])["module"]["init_args"] == {"lr": 3}
    assert one[2].startswith(
        "note: command line: module is now mymodel.py:Net, without the arguments given to mymodel.py:Needy"
    )


def test_a_file_is_looked_for_next_to_its_configuration_first(command: Command, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "theirs.py").write_text("from trainer import TrainModule\nclass Net(TrainModule): pass\n")
    (tmp_path / "sub" / "run.yaml").write_text("module: theirs.py:Net\n")
    assert resolved(command, "--config", "sub/run.yaml")["module"] == f"{tmp_path}/sub/theirs.py:Net"
    (tmp_path / "sub" / "run.yaml").write_text("module: mymodel.py:Net\n")
    assert resolved(command, "--config", "sub/run.yaml")["module"] == f"{tmp_path}/mymodel.py:Net"


def test_a_file_with_the_name_of_a_known_module_is_itself(command: Command, tmp_path: Path) -> None:
    for name in ("json", "trainer"):
        (tmp_path / f"{name}.py").write_text("from trainer.module import TrainModule\nclass Net(TrainModule): pass\n")
        assert resolved(command, "--module", f"{name}.py:Net")["module"] == f"{tmp_path}/{name}.py:Net"


# -- what the constructor gets -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("command")
def test_values_arrive_as_annotated() -> None:
    Path("run.yaml").write_text(
        "module:\n  class_path: mymodel.py:Net\n  lr: 1\n  sizes: [1, 2]\n  color: red\n  file: a/b\n  steps: {0: 4}\n"
        "  layers: {width: 3}\n  encoder: mymodel.Encoder\n  kind: mymodel.Encoder\n"
        "  encoders: [{class_path: mymodel.Encoder, size: 9}]\n  anything: {class_path: x}\n"
    )
    values = given(files=("run.yaml",))
    assert isinstance(values["lr"], float)
    assert values["sizes"] == (1, 2)
    assert type(values["color"]).__name__ == "Color"
    assert values["file"] == Path("a/b")
    assert values["steps"] == {0: 4}
    assert (values["layers"].width, values["layers"].depth) == (3, 2)  # type: ignore[attr-defined]
    assert values["encoder"].size == 3  # type: ignore[attr-defined]
    assert values["encoders"][0].size == 9  # type: ignore[index]
    assert values["kind"].__name__ == "Encoder"  # type: ignore[attr-defined]
    assert values["anything"] == {"class_path": "x"}


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("hour", ["3600", "3600.0", "00:01:00:00", "{hours: 1}"])
def test_a_file_takes_the_durations_that_python_takes(hour: str) -> None:
    timer, checkpoint = f"{{class_path: Timer, duration: {hour}}}", f"ModelCheckpoint, train_time_interval: {hour}"
    callbacks = f"callbacks: [{timer}, {{class_path: {checkpoint}}}]"
    Path("run.yaml").write_text(f"{RUN}trainer: {{max_time: {hour}, {callbacks}}}\n")
    trainer, _, _ = loaded("run.yaml").build()
    seconds = [getattr(one, name) for one, name in zip(trainer.callbacks, ("duration", "seconds"), strict=False)]
    assert [trainer.settings.max_seconds, *seconds] == [3600] * 3


@pytest.mark.usefixtures("command")
def test_the_seed_decides_the_weights() -> None:
    Path("run.yaml").write_text(RUN + QUIET)
    weights = [loaded("run.yaml").build()[1].layer.weight for _ in range(2)]  # type: ignore[union-attr]
    assert weights[0].equal(weights[1])  # type: ignore[operator]


# -- real runs -----------------------------------------------------------------------------------------------------


def run(*arguments: str, cwd: Path | None = None) -> Result:
    return fork_python(SCRIPT, *arguments, cwd=cwd).wait()


def test_fit_validate_test_and_predict(project: Path) -> None:
    """The project has a `callbacks` folder of its own; the run's configuration is then used in another folder."""
    (project / "callbacks").mkdir()
    (project / "callbacks" / "__init__.py").write_text("from trainer import Callback\nclass Mine(Callback): pass\n")
    (project / "run.yaml").write_text(RUN + QUIET.replace("{", "{callbacks: callbacks.Mine, ", 1))
    result = run("fit", "--config", "run.yaml", "--trainer.max_epochs", "2").check()
    for line in (
        *("after 8 steps:", "val_loss", "run directory:  runs/version_0\n"),
        *("configuration:  runs/version_0/config.yaml\n", "checkpoints:    runs/version_0/checkpoints\n"),
        "CSV log:        runs/version_0/metrics.csv\n",
        "trainer validate --config runs/version_0/config.yaml --ckpt-path last\n",
    ):
        assert line in result.stdout
    assert (project / "runs" / "version_0" / "metrics.csv").is_file()
    assert yaml.safe_load((project / "runs" / "version_0" / "config.yaml").read_text())["trainer"]["max_epochs"] == 2

    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    again = ["--config", str(project / "runs/version_0/config.yaml"), "--ckpt-path", "last"]
    validated = run("validate", *again, cwd=elsewhere).check()
    value = next(line for line in result.stdout.splitlines() if "val_loss" in line).split()[-1]
    *_, title, printed, where = [line.split() for line in validated.stdout.splitlines()]
    assert (title, printed) == (["validation:"], ["val_loss", value])
    assert where == ["run", "directory:", str(project / "runs" / "version_0")]
    predicted = run("predict", *again, "--trainer.limit_predict_batches", "2", cwd=elsewhere).check()
    assert predicted.stdout.startswith("predictions:    ")
    assert "CSV log" not in predicted.stdout
    folder = next(line.split()[-1] for line in predicted.stdout.splitlines() if line.startswith("predictions:"))
    assert list((elsewhere / folder).glob("*.safetensors"))
    _predictions_go_where_they_should(project)


def _predictions_go_where_they_should(project: Path) -> None:
    """Predict with the run's checkpoint and another root, and with its configuration after the run was moved."""
    written = project / "runs" / "version_0" / "predictions"
    rmtree(written)
    checkpoint = str(next((project / "runs" / "version_0" / "checkpoints").glob("epoch*")))
    config = ["predict", "--config", "runs/version_0/config.yaml", "--ckpt-path", checkpoint]
    run(*config, "--trainer.default_root_dir", "other/root", cwd=project).check()
    assert list((project / "other" / "root").glob("version_*/predictions/*.safetensors"))
    assert not written.exists()
    (project / "moved").mkdir()
    (project / "runs").rename(project / "moved" / "runs")
    run("predict", "--config", "moved/runs/version_0/config.yaml", "--ckpt-path", "last", cwd=project).check()
    assert list((project / "moved" / written.relative_to(project)).glob("*.safetensors"))
    assert not (project / "runs").exists()


def test_test_and_a_missing_checkpoint(command: Command) -> None:
    Path("run.yaml").write_text(RUN + QUIET)
    out, _ = done(command("test", "--config", "run.yaml"))
    assert "test:" in out.splitlines()
    refused(command, "test", "--config", "run.yaml", "--ckpt-path", "best")


def test_a_stopped_command_names_the_option_that_goes_on(project: Path) -> None:
    stops = (
        "import signal\nfrom mymodel import Net\n\nclass Stops(Net):\n    def training_step(self, batch, batch_idx):\n"
    )
    stops += "        signal.raise_signal(signal.SIGINT)\n        return super().training_step(batch, batch_idx)\n"
    (project / "stops.py").write_text(stops)
    words = ["fit", "--module", "stops.py:Stops", "--data", "mymodel.py:Data", "--trainer.max_epochs", "2"]
    stopped = run(*words).check(130)
    assert "To go on, start it again with --ckpt-path last; it writes into " in stopped.stdout
    own = ["fit", "--config", "runs/version_0/config.yaml", "--data.batch_size", "2", "--ckpt-path", "last"]
    again = run(*own).check(130)
    assert "If that is intended, --allow-changes batch_size, or allow_changes: [batch_size] in" in again.stderr


def test_two_processes_print_once(project: Path) -> None:
    (project / "run.yaml").write_text(RUN + QUIET)
    result = run("fit", "--config", "run.yaml", "--trainer.devices", "2", "--trainer.strategy", "ddp").check()
    assert result.stdout.count("run directory:") == 1


def test_a_bug_in_the_users_step_is_left_to_python(project: Path, command: Command) -> None:
    source = (project / "mymodel.py").read_text().replace('self.log("train_loss", loss)', 'raise KeyError("my bug")')
    (project / "mymodel.py").write_text(source)
    (project / "run.yaml").write_text(RUN + QUIET)
    with pytest.raises(KeyError, match="my bug"):
        command("fit", "--config", "run.yaml")
