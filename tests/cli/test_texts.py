"""A text arrives as it was written: on the command line, in a file, in a reference and in an environment variable."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helpers.project import Command, done, loaded, refused
from trainer.config.files import read_value, to_yaml

MODEL = """
import enum, pathlib, typing
from trainer import TrainModule
UserId = typing.NewType("UserId", str)
Bound = typing.TypeVar("Bound", bound=str)
One = typing.TypeVar("One", str, pathlib.Path)
Texts = CHOICES
Choice = enum.Enum("Choice", {f"M{number}": text for number, text in enumerate(Texts)})
class Model(TrainModule):
    def __init__(self, tag: str = "", name: str | None = None, root: str | pathlib.Path = ".", tags: list[str] = (),
                 table: dict[str, str] = {}, folder: pathlib.Path = "x", folders: list[pathlib.Path] = (),
                 width: int = 1, number: int | str = 0, free=None, mixed: str | list[str] = "",
                 user: typing.Annotated[UserId, ""] = "", bound: Bound | None = None, one: One = "",
                 pure: pathlib.PurePosixPath = ".", users: list[UserId] = (), chosen: typing.Literal[Texts] = Texts[0],
                 choice: Choice = Choice.M0, raw: bytes = b"", by: dict[typing.Literal[Texts], str] = {},
                 by_choice: dict[Choice, str] = {}, **more):
        super().__init__()
"""
CHOICES = ("[CLS]", "*", "---", "1", "0042", "null", "{a}", "&a", "- a", "a: b", "&a b", "true", "1e3", "a.b", "# x")
MODEL = MODEL.replace("CHOICES", repr(CHOICES))
TEXTS = [
    *("a: b", "@home", "*.parquet", "/data/run #2", "[0-9]+", "0042", "%d", "{x}", "{epoch:02d}-{val_loss:.2f}", "a:"),
    *("  a  ", "1e5", "- a", "> a"),
    *("a\tb", "a\nb", '{"a": 1}', "true", "", "~x", "'quoted'", '"', "&a", "1_000", "2026_11_28", "---", "null"),
    *("...", "!!null", "null # x", "&x null", "# x", "!!int 3", "1 # x", "&x 1", "--- 1", "!x", "{}", "[]", "[MASK]"),
    *("* x", "{epoch:02d}-{val_loss:.2f}"),
]


@pytest.fixture
def arguments(command: Command) -> object:
    """Return the module's arguments as a command prints them."""
    Path("model.py").write_text(MODEL)

    def of(*words: str) -> dict[str, object]:
        out, _ = done(command("fit", "--module", "model.py:Model", *words, "--print-config"))
        found: dict[str, object] = yaml.safe_load(out)["module"]["init_args"]
        return found

    return of


@pytest.mark.parametrize("text", TEXTS)
def test_typed_for_a_text(arguments: object, text: str) -> None:
    found = arguments(f"--module.tag={text}", f"--module.name=x{text}", "--module.root", f"s3://{text}")  # type: ignore[operator]
    assert found == {"tag": text, "name": f"x{text}", "root": f"s3://{text}"}
    names = ("tag", "name", "user", "bound", "one", "pure")
    found = arguments(*(f"--module.{name}={text}" for name in names))  # type: ignore[operator]
    no_text = {"name": None, "bound": None} if text == "null" else {}
    assert found == {**dict.fromkeys(names, text), **no_text}


@pytest.mark.parametrize("text", ["1 # x", "&x 1", "!!int 3", "--- 1", "%YAML 1.2\n--- 1"])
def test_what_yaml_has_around_a_number_makes_it_a_text(arguments: object, text: str, command: Command) -> None:
    assert arguments(f"--module.number={text}", f"--module.free={text}") == {"number": text, "free": text}  # type: ignore[operator]
    refused(command, "fit", "--module", "model.py:Model", f"--module.width={text}", "--print-config")


@pytest.mark.parametrize("text", CHOICES)
def test_choices_are_typed_as_they_are(arguments: object, text: str) -> None:
    typed = arguments(f"--module.chosen={text}", f"--module.choice={text}", f"--module.raw={text}")  # type: ignore[operator]
    assert typed == {"chosen": text, "choice": text, "raw": text}
    Path("run.yaml").write_text(to_yaml({"module": {"by": {text: "1e3"}, "by_choice": {text: "0042"}}}))
    assert arguments("--config", "run.yaml") == {"by": {text: "1e3"}, "by_choice": {text: "0042"}}  # type: ignore[operator]


@pytest.mark.parametrize("text", TEXTS)
def test_in_references(arguments: object, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TEXT", text)
    words = [
        *("--module.tag", "${env:A_TEXT}", "--module.name", "run-${env:A_TEXT}-x"),
        *("--module.root", "w-${module.mixed}"),
    ]
    found = arguments(*words, "--module.mixed", f"x{text}", "--module.free", "v${env:NOT_THERE,}")  # type: ignore[operator]
    assert found == {"tag": text, "name": f"run-{text}-x", "root": f"w-x{text}", "mixed": f"x{text}", "free": "v"}


def test_numbers_of_a_file_are_texts_where_a_text_is_wanted(arguments: object) -> None:
    lines = ["tag: 0042", "name: null", "tags: [1e5, 007, true]", "table: {a: 1.50, b: x}", "number: 0042", "free: 1e3"]
    Path("run.yaml").write_text("\n  ".join(["module:", *lines, "width: 7", "other: 0x10"]))
    found = arguments("--config", "run.yaml")  # type: ignore[operator]
    assert found == {
        "tag": "0042",
        "name": None,
        "tags": ["1e5", "007", "true"],
        "table": {"a": "1.50", "b": "x"},
        "number": 42,
        "free": 1000.0,
        "width": 7,
        "other": 16,
    }


def test_what_is_no_text_is_read_as_yaml_as_before(arguments: object, command: Command) -> None:
    words = ["--module.tags", "[0042, a b]", "--module.number", "5", "--module.free", "[1, 2]", "--module.mixed", "[a]"]
    found = arguments(*words, "--module.name", "null", "--module.width=3")  # type: ignore[operator]
    expected = {"tags": ["0042", "a b"], "number": 5, "free": [1, 2], "mixed": ["a"], "name": None, "width": 3}
    assert found == expected
    for name in ("width", "tags", "free", "unknown"):
        refused(command, "fit", "--module", "model.py:Model", f"--module.{name}", "[1, 2", "--print-config")


def test_paths_are_saved_for_any_folder(arguments: object) -> None:
    here = Path.cwd()
    words = ["--module.folder", "~/x", "--module.folders", "[a, /b, ~/c]", "--module.tag", "a/b"]
    found = arguments(*words)  # type: ignore[operator]
    assert found == {"folder": "~/x", "folders": [str(here / "a"), "/b", "~/c"], "tag": "a/b"}


@pytest.mark.parametrize("text", ["", "  "])
def test_a_text_of_nothing_is_not_null(arguments: object, text: str, command: Command) -> None:
    found = arguments("--module.name", text, "--module.free", text)  # type: ignore[operator]
    assert found == {"name": text, "free": text}
    refused(command, "fit", "--module", "model.py:Model", "--module.width", text)


def test_a_path_that_is_a_url_is_refused(arguments: object, command: Command) -> None:
    """A Path makes s3:/b of s3://b, which is another place."""
    for words in (("--module.folder", "s3://b/c"), ("--module.folders", "[a, s3://b/c]")):
        refused(command, "fit", "--module", "model.py:Model", *words)
    assert arguments("--module.root", "s3://b//c") == {"root": "s3://b//c"}  # type: ignore[operator]


def test_an_argument_whose_default_is_none_may_be_null(command: Command) -> None:
    """As people write them: `act: nn.Module = None`."""
    model = MODEL.replace("width: int = 1", "width: int = None, act: 'torch.nn.Module' = None").replace(
        "import pathlib", "import pathlib, torch"
    )
    Path("model.py").write_text(model)
    Path("run.yaml").write_text("module: {class_path: model.py:Model, width: 3, act: torch.nn.ReLU}\n")
    out, err = done(
        command("fit", "--config", "run.yaml", "--module.width", "null", "--module.act", "null", "--print-config")
    )
    assert yaml.safe_load(out)["module"]["init_args"] == {"width": None, "act": None}
    _, _, err = command("fit", "--config", "run.yaml", "--module.width", "x")
    assert 'given "x", allowed: an integer or null' in err


@pytest.mark.parametrize("words", [("run.json",), ("run.toml",), ("run.yaml", "--module.steps.2", "7")])
def test_keys_may_be_numbers_where_a_text_is_all_there_is(words: tuple[str, ...], command: Command) -> None:
    Path("model.py").write_text(MODEL.replace("width: int = 1", "steps: dict[int, float] = {}"))
    Path("run.json").write_text('{"module": {"class_path": "model.py:Model", "steps": {"1": 0.5, "2": 7}}}')
    Path("run.toml").write_text('[module]\nclass_path = "model.py:Model"\nsteps = {1 = 0.5, 2 = 7}\n')
    Path("run.yaml").write_text("module: {class_path: model.py:Model, steps: {1: 0.5}, table: {'1': a}}\n")
    assert loaded(words[0], overrides=[("module.steps.2", read_value("7", "x"))]).module.arguments["steps"] == {
        1: 0.5,
        2: 7.0,
    }
    done(command("fit", "--config", *words, "--print-config"))
    refused(command, "fit", "--config", words[0], "--module.steps.a", "7")
