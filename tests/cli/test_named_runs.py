""" "last" and "best" beside a run's own configuration are that run's, in every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.helpers.project import Command, done, refused
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.config import load

RUN = """
module: {class_path: mymodel.py:Net, init_args: {lr: 0.01}}
data: mymodel.py:Data
trainer:
  {max_epochs: 1, seed: 1, accelerator: cpu, logger: false, enable_progress_bar: false, enable_model_summary: false,
   callbacks: [ModelCheckpoint]}
"""


@pytest.fixture
def runs(command: Command) -> Command:
    """Train two runs that differ in their learning rate and seed."""
    Path("run.yaml").write_text(RUN)
    for words in ((), ("--module.lr", "0.2", "--seed", "5")):
        done(command("fit", "--config", "run.yaml", *words))
    return command


def step(run: str) -> int:
    found = CheckpointDirectory(Path(run, "checkpoints")).resolve("last")
    progress = json.loads((Path(str(found)) / "checkpoint.json").read_text())["progress"]
    return int(progress["step"])


def record(run: str) -> dict[str, object]:
    loaded: dict[str, object] = yaml.safe_load(Path(run, "config.yaml").read_text())
    return loaded


def test_fit_goes_on_in_the_run_whose_configuration_it_is_given(runs: Command) -> None:
    steps, other = step("runs/version_0"), record("runs/version_1")
    again = ("fit", "--config", "runs/version_0/config.yaml", "--ckpt-path", "last", "--trainer.max_epochs", "2")
    out, err = done(runs(*again))
    assert "run directory:  runs/version_0" in out
    assert (step("runs/version_0"), step("runs/version_1")) == (2 * steps, steps)
    assert record("runs/version_1") == other
    assert "ckpt_path" not in record("runs/version_0")
    # Another file beside it, in any order, and a moved run.
    Path("more.yaml").write_text("trainer: {max_epochs: 3}\n")
    Path("runs").rename("moved")
    config = "moved/version_0/config.yaml"
    out, err = done(runs("fit", "--config", config, "more.yaml", "--ckpt-path", "last"))
    assert err.splitlines()[0] == "note: --ckpt-path last is taken from moved/version_0"
    assert "run directory:  moved/version_0" in out
    assert (step("moved/version_0"), step("moved/version_1")) == (3 * steps, steps)
    assert not Path("runs").exists()
    # From its best checkpoint a new run begins, as from the path of one.
    out, err = done(runs("fit", "--config", config, "--ckpt-path", "best", "--trainer.max_epochs", "4"))
    assert "run directory:  moved/version_2" in out


@pytest.mark.parametrize("order", [("config", "more"), ("more", "config")])
def test_an_evaluation_is_of_that_run_beside_any_other_file(runs: Command, order: tuple[str, str]) -> None:
    Path("more.yaml").write_text("trainer: {limit_val_batches: 2}\n")
    files = {"config": "runs/version_0/config.yaml", "more": "more.yaml"}
    expected = runs("validate", "--config", files["config"], "--ckpt-path", "last", "--trainer.limit_val_batches", "2")
    found = runs("validate", "--config", *[files[name] for name in order], "--ckpt-path", "last")
    assert found[0] == 0, found[2]
    assert found[1] == expected[1]
    other = runs("validate", "--config", "runs/version_1/config.yaml", "more.yaml", "--ckpt-path", "last")
    assert other[1] != found[1]


def test_two_runs_are_too_many(runs: Command) -> None:
    files = [f"runs/version_{number}/config.yaml" for number in (0, 1)]
    refused(runs, "validate", "--config", *files, "--ckpt-path", "last")
    assert runs("validate", "--config", *files, "--ckpt-path", "runs/version_1")[0] == 0
    for which in ("last", "best"):
        first = runs("validate", "--config", files[0], "--ckpt-path", which)[2].splitlines()[0]
        assert first == f"note: --ckpt-path {which} is taken from runs/version_0"


def test_a_name_beside_the_configuration_of_another_run_is_refused(runs: Command) -> None:
    done(runs("fit", "--config", "runs/version_0/config.yaml", "--name", "1e3", "--trainer.max_epochs", "2"))
    before = [record(f"runs/version_{number}") for number in range(3)]
    Path("over.yaml").write_text("name: 1e3\n")
    for command, which in (("validate", "last"), ("test", "best"), ("fit", "last")):
        for number, name in ((0, "1e3"), (2, "other")):
            config = f"runs/version_{number}/config.yaml"
            refused(runs, command, "--config", config, "--name", name, "--ckpt-path", which)
        assert runs(command, "--config", "runs/version_0/config.yaml", "over.yaml", "--ckpt-path", which)[0] == 2
    config = "runs/version_2/config.yaml"
    assert runs("validate", "--config", config, "--name", "1e3", "--ckpt-path", "last")[0] == 0
    assert [record(f"runs/version_{number}") for number in range(3)] == before


def test_that_there_is_no_checkpoint_yet_is_said(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    Path("run.yaml").write_text(RUN)
    caplog.set_level("INFO", "trainer")
    done(command("fit", "--config", "run.yaml", "--ckpt-path", "last", "--trainer.default_root_dir", "new"))
    words = f"--ckpt-path last: there is no checkpoint in {Path.cwd() / 'new'} yet, so the training starts"
    assert words in caplog.text
    assert "ckpt_path" not in record("new/version_0")


def test_a_run_without_checkpoints_is_still_the_run_of_its_configuration(runs: Command) -> None:
    """As one is that was killed in its first batch."""
    shutil.rmtree("runs/version_0/checkpoints")
    config, other = ("--config", "runs/version_0/config.yaml"), record("runs/version_1")
    refused(runs, "validate", *config, "--ckpt-path", "last")
    out, _ = done(runs("fit", *config, "--ckpt-path", "last", "--trainer.max_epochs", "2"))
    assert "run directory:  runs/version_2" in out
    assert record("runs/version_1") == other


def test_the_objects_of_a_runs_configuration_go_on_in_that_run(runs: Command) -> None:
    steps = step("runs/version_0")
    for words in (("runs/version_0/config.yaml",), ("run.yaml",)):  # by its file, and by its content
        overrides = {"ckpt_path": "last", "trainer.max_epochs": 1 + step("runs/version_0") // steps}
        one = load(*words, overrides=overrides)
        one.trainer.fit(one.module, one.data, ckpt_path=one.ckpt_path)
        assert one.trainer.run_dir.absolute() == Path("runs/version_0").absolute()
    assert (step("runs/version_0"), step("runs/version_1")) == (3 * steps, steps)


def test_a_record_does_not_begin_from_the_best_checkpoint_again(runs: Command) -> None:
    Path("best.yaml").write_text(f"{RUN}ckpt_path: best\n")
    done(runs("fit", "--config", "best.yaml", "--trainer.max_epochs", "2"))
    assert "ckpt_path" not in record("runs/version_2")


def test_a_configuration_of_the_users_in_a_folder_called_like_a_run_is_not_that_of_a_run(command: Command) -> None:
    config = Path("mine/version_2/config.yaml")
    config.parent.mkdir(parents=True)
    config.write_text(RUN)
    for words in ((), ("--ckpt-path", "last", "--trainer.max_epochs", "2")):
        out, _ = done(command("fit", "--config", str(config), *words))
        assert "run directory:  runs/version_0" in out


def test_a_project_with_weights_of_its_own_in_a_folder_called_checkpoints_is_no_run(command: Command) -> None:
    Path("checkpoints").mkdir()
    Path("checkpoints/resnet.pt").write_bytes(b"weights")
    Path("config.yaml").write_text(RUN)
    for words in ((), ("--ckpt-path", "last", "--trainer.max_epochs", "2")):
        out, _ = done(command("fit", "--config", "config.yaml", *words))
        assert "run directory:  runs/version_0" in out


def test_a_typed_folder_stands_over_that_of_the_run_in_whose_folder_the_command_is_typed(
    runs: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path.cwd() / "out"
    monkeypatch.chdir("runs/version_0")
    printed, _ = done(runs("fit", "--config", "config.yaml", "--trainer.default_root_dir", str(out)))
    assert f"run directory:  {out / 'version_0'}" in printed
    one = load("config.yaml", overrides={"trainer.default_root_dir": str(out), "ckpt_path": "last"})
    assert one.trainer.default_root_dir == str(out)
    assert load("config.yaml").trainer.default_root_dir == str(Path.cwd().parent)


def test_a_finished_run_that_the_same_command_starts_again_stays_as_it_is(
    command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    Path("run.yaml").write_text(RUN.replace("logger: false", "logger: [CSVLogger, JSONLLogger]"))
    again = ("fit", "--config", "run.yaml", "--ckpt-path", "last")

    def files() -> dict[Path, tuple[int, bytes]]:
        found = [path for path in Path("runs").rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    assert command(*again)[0] == 0
    before = files()
    caplog.clear()
    code, _, _ = command(*again)
    assert (code, files()) == (0, before)
    assert caplog.text.count("nothing is left to train") == 1
