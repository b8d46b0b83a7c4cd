"""Which run "last" and "best" are, where no file says it: the newest of the same name, or of the same content."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cli.test_named_runs import RUN, record, step
from tests.helpers.project import Command, done, refused

LAST = ("--ckpt-path", "last")


@pytest.fixture
def fit(command: Command) -> Command:
    Path("run.yaml").write_text(RUN)
    return lambda *words: command("fit", "--config", "run.yaml", *words)


def test_members_of_a_sweep_go_on_by_their_own_commands(fit: Command) -> None:
    """Drawn: which member is started next, and how many epochs further."""
    rng, rates, epochs = random.Random(4), ["0.1", "0.2", "0.3"], [1, 1, 1]
    for rate in rates:
        done(fit("--module.lr", rate))
    per_epoch = step("runs/version_0")
    for _ in range(6):
        number = rng.randrange(3)
        epochs[number] += 1
        out, err = done(fit("--module.lr", rates[number], *LAST, "--trainer.max_epochs", str(epochs[number])))
        assert err.splitlines()[0] == f"note: --ckpt-path last is taken from runs/version_{number}"
        assert f"run directory:  runs/version_{number}" in out
        assert [step(f"runs/version_{one}") // per_epoch for one in range(3)] == epochs
        assert "ckpt_path" not in record(f"runs/version_{number}")
    assert len([*Path("runs").iterdir()]) == 3


def test_checkpoints_may_lie_elsewhere(fit: Command, command: Command) -> None:
    elsewhere = ("--trainer.callbacks", "{class_path: ModelCheckpoint, dirpath: elsewhere}")
    assert fit("--module.lr", "0.1")[0] == 0
    assert fit("--module.lr", "0.1", *elsewhere)[0] == 0
    before = step("runs/version_0")
    out, err = done(fit("--module.lr", "0.1", *elsewhere, *LAST, "--trainer.max_epochs", "2"))
    assert "note: --ckpt-path last is taken from runs/version_1\n" in err
    assert "run directory:  runs/version_1" in out
    assert step("runs/version_0") == before
    out, err = done(command("validate", "--config", "runs/version_1/config.yaml", "run.yaml", *LAST))
    assert "note: --ckpt-path last is taken from runs/version_1\n" in err
    out, err = done(command("validate", "--config", "runs/version_1/config.yaml", "--ckpt-path", "best"))


def test_the_first_start_begins_anew_and_says_so(fit: Command) -> None:
    code, _, err = fit(*LAST)
    assert code == 0, err
    assert err.splitlines()[0] == "note: there is no such run below runs yet: the training begins"
    assert step("runs/version_0") > 0


def test_without_an_equal_run_fit_lists_what_differs(fit: Command, command: Command) -> None:
    assert fit("--module.lr", "0.1")[0] == 0
    assert fit("--module.lr", "0.2", "--module.width", "3")[0] == 0
    before = record("runs/version_1"), step("runs/version_1")
    refused(fit, "--module.lr", "0.3", *LAST)
    assert (record("runs/version_1"), step("runs/version_1")) == before
    # Both ways that it names.
    words = ("--config", "runs/version_1/config.yaml", *LAST, "--module.lr", "0.3", "--trainer.max_epochs", "2")
    out, err = done(command("fit", *words))
    assert "run directory:  runs/version_1" in out
    code, out, err = fit("--module.lr", "0.3", "--name", "third", *LAST)
    assert code == 0, err
    assert "there is no such run below runs yet: the training begins" in err
    assert "run directory:  runs/version_2" in out
    refused(command, "validate", "--config", "run.yaml", "--module.lr", "0.7", *LAST)


def test_other_commands_take_the_only_run_and_say_what_differs(fit: Command, command: Command) -> None:
    assert fit("--module.lr", "0.1")[0] == 0
    _, err = done(command("validate", "--config", "run.yaml", "--module.lr", "0.7", *LAST))
    assert "is taken from runs/version_0, although it has module.lr 0.1 there, 0.7 here" in err


def test_a_name_decides(fit: Command, command: Command) -> None:
    for name, rate in (("a", "0.1"), ("b", "0.2")):
        assert fit("--name", name, "--module.lr", rate)[0] == 0
    assert [record(f"runs/version_{number}")["name"] for number in (0, 1)] == ["a", "b"]
    out, err = done(fit("--name", "a", *LAST, "--trainer.max_epochs", "2", "--module.lr", "0.5"))
    assert "run directory:  runs/version_0" in out
    assert "although it has module.lr 0.1 there, 0.5 here" in err
    out, _ = done(command("runs", "ls", "runs"))
    assert "version_0 (a)" in out
    assert "version_1 (b)" in out
    _, out, _ = command("runs", "ls", "runs/version_1", "runs/version_0")
    assert out.index("runs/version_1 (b)") < out.index("runs/version_0 (a)")
    refused(command, "validate", "--config", "run.yaml", "--name", "c", *LAST)
    Path("runs/version_0/metrics.csv").write_text("step,loss\n1,2.0\n")
    from trainer.cli.plot import curves_of

    assert [*curves_of(["runs"])["loss"]] == ["runs/version_0 (a)"]


def test_a_run_keeps_its_name_and_weights_when_it_goes_on(fit: Command, command: Command) -> None:
    assert fit()[0] == 0
    for name in ("a", "b"):
        assert command("checkpoint", "export", "runs/version_0", f"{name}.safetensors")[0] == 0
        done(fit("--name", name, "--weights", f"{name}.safetensors", "--seed", "2"))
    kept = record("runs/version_2")
    for epochs, words in (("2", ("--weights", "a.safetensors")), ("3", ("--name", "a"))):
        out, _ = done(fit("--seed", "2", *words, *LAST, "--trainer.max_epochs", epochs))
        assert "run directory:  runs/version_1" in out
        there = record("runs/version_1")
        assert (there["name"], there["weights"]) == ("a", str(Path("a.safetensors").absolute()))
    assert record("runs/version_2") == kept
    # Without the weights it is the run of the same values that has none, or one that has some.
    for seed, run in (("1", 0), ("2", 2)):
        out, _ = done(fit("--seed", seed, *LAST, "--trainer.max_epochs", "4"))
        assert f"run directory:  runs/version_{run}" in out
    refused(fit, "--seed", "2", "--weights", "runs", *LAST)


def test_a_moved_project_is_the_same(fit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit("--module.lr", "0.1", "--module.file", "x")[0] == 0
    project = Path.cwd()
    moved = project.with_name(f"{project.name}-moved")
    project.rename(moved)
    monkeypatch.chdir(moved)
    out, _ = done(fit("--module.lr", "0.1", "--module.file", "x", *LAST, "--trainer.max_epochs", "2"))
    assert "run directory:  runs/version_0" in out


def test_files_of_one_name_are_two_modules(fit: Command) -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "mymodel.py").write_text(Path("mymodel.py").read_text())
    module = ("--module", "a/mymodel.py:Net")
    assert [fit("--module", f"{folder}/mymodel.py:Net")[0] for folder in ("a", "b")] == [0, 0]
    out, _ = done(fit(*module, *LAST, "--trainer.max_epochs", "2"))
    assert "run directory:  runs/version_0" in out
    refused(fit, *LAST)


OPTIMIZED = "\n\nclass Bare(Net):\n    configure_optimizers = TrainModule.configure_optimizers\n"


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("--module", "mymodel.py:Bare", "--optimizer", "SGD", "--optimizer.lr"), ("0.1", "0.2")),
        (("--module", "mymodel.py:Bare", "--optimizer"), ("SGD", "AdamW")),
        (
            (
                *("--module", "mymodel.py:Bare", "--optimizer", "SGD", "--lr_scheduler"),
                *("StepLR", "--lr_scheduler.step_size"),
            ),
            ("1", "2"),
        ),
        (("--seed",), ("4", "5")),
    ],
)
def test_optimizers_and_seeds_tell_members_apart(fit: Command, words: tuple[str, ...], values: tuple[str, str]) -> None:
    Path("mymodel.py").write_text(Path("mymodel.py").read_text() + OPTIMIZED)
    for value in values:
        done(fit(*words, value))
    kept = record("runs/version_1")
    out, _ = done(fit(*words, values[0], *LAST, "--trainer.max_epochs", "2"))
    assert "run directory:  runs/version_0" in out
    assert record("runs/version_1") == kept


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("precision", ("32-true", "bf16-mixed", "64-true")),
        ("accumulate_grad_batches", ("1", "2", "3")),
        ("gradient_clip_val", ("null", "0.5", "1.0")),
        ("strategy", ("auto", "ddp", "fsdp")),
    ],
)
def test_settings_of_the_trainer_tell_equal_runs_apart(fit: Command, setting: str, values: tuple[str, ...]) -> None:
    """The first value is the default, and the last one a change on purpose."""
    for words in ((), (f"--trainer.{setting}", values[1])):
        assert fit(*words)[0] == 0
    again = (*LAST, "--trainer.max_epochs", "2", f"--trainer.{setting}")
    for number, value in ((0, values[0]), (1, values[1])):
        out, err = done(fit(*again, value))
        assert f"run directory:  runs/version_{number}" in out
        assert err.splitlines()[0] == f"note: --ckpt-path last is taken from runs/version_{number}"
    code, out, err = fit(*LAST, "--trainer.max_epochs", "3", f"--trainer.{setting}", values[2])
    assert code == 0, err
    assert "run directory:  runs/version_1" in out
