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
        assert err.splitlines()[0] == f"note: --ckpt-path last is that of runs/version_{number}"
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
    assert "note: --ckpt-path last is that of runs/version_1\n" in err
    assert "run directory:  runs/version_1" in out
    assert step("runs/version_0") == before
    out, err = done(command("validate", "--config", "runs/version_1/config.yaml", "run.yaml", *LAST))
    assert "note: --ckpt-path last is that of runs/version_1\n" in err
    out, err = done(command("validate", "--config", "runs/version_1/config.yaml", "--ckpt-path", "best"))


def test_the_first_start_begins_anew_and_says_so(fit: Command) -> None:
    _, err = done(fit(*LAST))
    assert err.splitlines()[0] == "note: there is no run below runs yet: the training begins anew"
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
    out, err = done(fit("--module.lr", "0.3", "--name", "third", *LAST))
    assert "no run below runs is called 'third' yet: the training begins anew" in err
    assert "run directory:  runs/version_2" in out
    refused(command, "validate", "--config", "run.yaml", "--module.lr", "0.7", *LAST)


def test_other_commands_take_the_only_run_and_say_what_differs(fit: Command, command: Command) -> None:
    assert fit("--module.lr", "0.1")[0] == 0
    _, err = done(command("validate", "--config", "run.yaml", "--module.lr", "0.7", *LAST))
    assert "is that of runs/version_0, although it has module.lr 0.1 there, 0.7 here" in err


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


def test_a_class_of_a_file_is_that_of_its_module(fit: Command) -> None:
    Path("pack").mkdir()
    Path("pack/mymodel.py").write_text(Path("mymodel.py").read_text())
    for number, names in enumerate((("mymodel.Net", "mymodel.py:Net"), ("pack/mymodel.py:Net", "pack.mymodel.Net"))):
        for words in (("--module", names[0]), ("--module", names[1], *LAST, "--trainer.max_epochs", "2")):
            out, _ = done(fit(*words))
            assert f"run directory:  runs/version_{number}" in out


TYPED = """
class Act(enum.Enum):
    RELU = torch.nn.ReLU
    GELU = torch.nn.GELU


class Typed(Net):
    def __init__(
        self,
        dt: torch.dtype | None = torch.float32,
        layers: Layers = Layers(3),
        names: frozenset[str] = frozenset({"a", "b"}),
        file: Path | None = Path("x"),
        color: Color = Color.RED,
        act: Act = Act.RELU,
        kind: type[torch.nn.Module] = torch.nn.ReLU,
        dts: list[torch.dtype] = [torch.float32],
        by: dict[Color, torch.device] = {Color.RED: torch.device("cpu")},
    ):
        super().__init__()
"""
DEFAULTS = (
    *("--module.dt", "float32", "--module.layers.width", "3", "--module.names", "[b, a]"),
    *("--module.file", "x", "--module.color", "RED", "--module.act", "RELU", "--module.kind", "torch.nn.ReLU"),
    *("--module.dts", "[float32]", "--module.by", "{RED: cpu}"),
)


@pytest.mark.parametrize(("first", "second"), [((), DEFAULTS), (DEFAULTS, ())])
def test_defaults_of_any_type_may_be_typed_out(fit: Command, first: tuple[str, ...], second: tuple[str, ...]) -> None:
    Path("mymodel.py").write_text(Path("mymodel.py").read_text() + TYPED)
    Path("run.yaml").write_text(RUN.replace("{class_path: mymodel.py:Net, init_args: {lr: 0.01}}", "mymodel.py:Typed"))
    assert fit(*first)[0] == 0
    out, _ = done(fit(*second, *LAST, "--trainer.max_epochs", "2"))
    assert "run directory:  runs/version_0" in out
    refused(fit, *DEFAULTS, "--module.dt", "float16", "--module.layers.depth", "3", *LAST)
    refused(fit, "--module.dts", "[float16]", "--module.act", "GELU", "--module.kind", "torch.nn.GELU", *LAST)
    for words in (("--module.dt", "floaty"), ("--module.dts", "[floaty]")):
        refused(fit, *words)


NESTED = """
class Part(torch.nn.Module):
    def __init__(self, width: int = 4, act: torch.nn.Module | None = None, inner: "Part" = None,
                 folder: Path = Path("x")):
        super().__init__()


@dataclass
class Options:
    part: Part = None
    rate: float = 0.5


class Nested(Net):
    def __init__(
        self, part: Part = None, parts: list[Part] = (), by: dict[str, Part] = {}, pair: tuple[int, Part] = None,
        options: Options = None, make: Callable[..., Part] = Part,
    ):
        super().__init__()
"""
PART = "class_path: mymodel.Part"
BRIEF = {
    "part": f"{{{PART}, inner: {{{PART}}}}}",
    "parts": f"[{{{PART}}}]",
    "by": f"{{a: {{{PART}}}}}",
    "pair": f"[1, {{{PART}}}]",
    "options": f"{{part: {{{PART}}}}}",
    "make": f"{{{PART}}}",
}


@pytest.mark.parametrize("name", BRIEF)
def test_defaults_of_nested_objects_may_be_typed_out(name: str, fit: Command) -> None:
    """Wherever they stand, in the run or in the command; another value is another run."""
    imports = "from collections.abc import Callable\nfrom dataclasses import dataclass\nfrom pathlib import Path\n"
    Path("mymodel.py").write_text(imports + Path("mymodel.py").read_text() + NESTED)
    net = "{class_path: mymodel.py:Net, init_args: {lr: 0.01}}"
    Path("run.yaml").write_text(RUN.replace(net, "mymodel.py:Nested"))
    brief = BRIEF[name]
    at = brief.rindex(PART) + len(PART)
    typed = [f"{brief[:at]}, {more}{brief[at:]}" for more in ("width: 4", "act: null, folder: x", "width: 5")]
    if name == "options":
        typed[1] = typed[1].replace("{part", "{rate: 0.5, part")
    assert fit(f"--module.{name}", typed[0])[0] == 0
    for text, epochs in ((brief, "2"), (typed[1], "3"), (typed[0], "4")):
        out, err = done(fit(f"--module.{name}", text, *LAST, "--trainer.max_epochs", epochs))
        assert "run directory:  runs/version_0" in out
    code, _, err = fit(f"--module.{name}", typed[2], *LAST)
    assert (code, err.count(f"module.{name} ")) == (2, 1)


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
        newest = ", by the trainer's settings; the newest is runs/version_1" if number == 0 else ""
        assert err.splitlines()[0] == f"note: --ckpt-path last is that of runs/version_{number}{newest}"
    out, err = done(fit(*LAST, "--trainer.max_epochs", "3", f"--trainer.{setting}", values[2]))
    assert "run directory:  runs/version_1" in out
