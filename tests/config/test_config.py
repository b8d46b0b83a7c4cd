"""Configuration files become trees that know their lines; trees are laid over each other; values fit annotations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.project import assert_recorded
from tests.messages import raises_recorded
from trainer.config import load
from trainer.config.files import read_file, to_yaml
from trainer.config.tree import Diagnostics, Node, Source, canonical, dotted, from_override, is_index, merge
from trainer.config.types import constructor_parameters
from trainer.errors import ConfigError


def read(text: str, name: str = "run.yaml") -> tuple[Any, list[str]]:
    """Return the tree of a file with this text, and its problems."""
    Path(name).write_text(text, encoding="utf-8")
    findings = Diagnostics()
    tree = read_file(name, findings)
    return (tree.plain() if tree else None), [str(problem) for problem in findings.problems]


def lines(node: Node, place: tuple[Any, ...] = ()) -> dict[str, int | None]:
    """Return the line of every value by its key path."""
    found = {dotted(place): node.source.line} if place else {}
    children = node.value if isinstance(node.value, dict) else {}
    if isinstance(node.value, list):
        children = dict(enumerate(node.value))
    for key, child in children.items():
        found.update(lines(child, (*place, key)))
    return found


def sources(node: Node) -> list[Source]:
    """Return the sources of a value and of the values in it."""
    children = list(node.value.values()) if isinstance(node.value, dict) else node.value
    inside = [source for child in children for source in sources(child)] if isinstance(children, list) else []
    return [node.source, *inside]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("-3", -3),
        (".5", 0.5),
        ("3.", 3.0),
        (".inf", float("inf")),
        ("true", True),
        ("yes", "yes"),
        ("on", "on"),
        ("~", None),
        ("", None),
        ("'3'", "3"),
        ("10:00:00:00", "10:00:00:00"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        (r'"a\x85b"', "a\x85b"),
        (r'{"\x85": "\u2028 \x85\n"}', {"\x85": "\u2028 \x85\n"}),
        ("[1, a, null]", [1, "a", None]),
        ("{0: 1}", {0: 1}),
    ],
)
def test_scalars_are_those_of_yaml_1_2_and_survive_a_round_trip(text: str, value: Any) -> None:
    assert read(f"x: {text}\n") == ({"x": value}, [])
    assert read(to_yaml({"x": value})) == ({"x": value}, [])


def test_every_value_of_yaml_and_json_has_its_line() -> None:
    Path("run.yaml").write_text(
        "module:\n  init_args:\n    lr: 1\n\ntrainer:\n  callbacks:\n  - A\n  - class_path: B\n"
    )
    Path("run.json").write_text(
        '{\n"module": {\n\t"init_args": {\n"lr": 1}},\n"trainer": {\n"callbacks": [\n"A",\n{"class_path": "\\u00e4"}]}}'
    )
    findings = Diagnostics()
    trees = {suffix: read_file(f"run.{suffix}", findings) for suffix in ("yaml", "json")}
    assert findings.problems == []
    assert lines(trees["yaml"]) == {  # type: ignore[arg-type]
        "module": 1,
        "module.init_args": 2,
        "module.init_args.lr": 3,
        "trainer": 5,
        "trainer.callbacks": 6,
        "trainer.callbacks.0": 7,
        "trainer.callbacks.1": 8,
        "trainer.callbacks.1.class_path": 8,
    }
    assert lines(trees["json"])["module.init_args.lr"] == 4  # type: ignore[arg-type]
    assert lines(trees["json"])["trainer.callbacks.1"] == 8  # type: ignore[arg-type]
    assert trees["json"].plain()["trainer"]["callbacks"][1] == {"class_path": "ä"}  # type: ignore[union-attr]


def test_a_value_of_toml_has_its_file() -> None:
    Path("run.toml").write_text('[trainer]\nmax_epochs = 3\n[[trainer.callbacks]]\nclass_path = "A"\nx = 2024-01-01\n')
    tree = read_file("run.toml", Diagnostics())
    assert tree is not None
    assert tree.plain() == {"trainer": {"max_epochs": 3, "callbacks": [{"class_path": "A", "x": "2024-01-01"}]}}
    assert set(map(str, sources(tree))) == {"run.toml"}


def test_json_is_read_as_json() -> None:
    data = {"a": [1, 2.5, True, None, "1e-3", "\u00e9\U0001f600", "x/y"], "b": {"c": ""}, "d": 1e-7}
    assert read(json.dumps(data), "run.json") == (data, [])
    assert read(json.dumps(data, indent="\t"), "run.json") == (data, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "a: 1\nb: [1\nc: 2\n"),
        ("run.yaml", "a:\n\tb: 1\n"),
        ("run.yaml", "a: 1\n b: 2\n"),
        ("run.yaml", "a: *b\n"),
        ("run.yaml", "a: 1\n---\nb: 2\n"),
        ("run.yaml", "a: 1\nb: \x07\n"),
        ("run.yaml", "a: 1\nb: 2\na: 3\n"),
        ("run.yaml", "x:\n  a: &a [*a]\n"),
        ("run.yaml", "x: !!python/object:os.system 3\n"),
        ("run.yaml", "? [a]\n: 3\n"),
        ("run.yaml", ""),
        ("run.yaml", "\n# only this\n"),
        ("run.yaml", "\n- a\n"),
        ("run.json", ""),
        ("run.json", '{"a": 1,\n"b" 2}'),
        ("run.json", '{"a": 1,\n"a": 2}'),
        ("run.toml", "a = 1\nb = \n"),
        ("run.toml", "a = 1\na = 2\n"),
        ("run.ini", "a = 1\n"),
    ],
)
def test_a_broken_file_is_named_with_its_line(name: str, text: str) -> None:
    value, problems = read(text, name)
    assert value is None
    assert len(problems) == 1
    assert_recorded(problems[0])


def test_a_missing_file_is_named_with_one_that_is_there() -> None:
    Path("run.yaml").write_text("a: 1\n")
    findings = Diagnostics()
    assert read_file("run.yml", findings) is None
    assert str(findings.problems[0]) == f"run.yml: there is no such file in {Path.cwd()}. Did you mean 'run.yaml'?"


def test_yaml_anchors_and_merge_keys_work() -> None:
    text = "base: &base {lr: 1, width: 2}\nmore:\n  <<: *base\n  lr: 3\n"
    assert read(text)[0]["more"] == {"width": 2, "lr": 3}


# -- laying over ------------------------------------------------------------------------------------------------------


def tree_of(text: str) -> Node:
    Path("tree.yaml").write_text(text)
    findings = Diagnostics()
    tree = read_file("tree.yaml", findings)
    assert tree is not None
    tree = canonical(tree, findings)
    assert findings.problems == []
    return tree


def merged(*texts: str) -> tuple[Any, list[str], list[str]]:
    findings = Diagnostics()
    result = tree_of(texts[0])
    for text in texts[1:]:
        result = merge(result, tree_of(text), findings)
    return result.plain(), [str(problem) for problem in findings.problems], findings.notes


@pytest.mark.parametrize(
    "short",
    [
        "module: a.B",
        "module: {class_path: a.B}",
        "module: {class_path: a.B, init_args: }",
        "module: {class_path: a.B, init_args: {}}",
    ],
)
def test_short_forms_of_a_class(short: str) -> None:
    assert tree_of(short).plain() == {"module": {"class_path": "a.B"}}


def test_short_forms_in_the_trainer() -> None:
    tree = tree_of("trainer: {strategy: {class_path: ddp, x: 1}, callbacks: {class_path: A, y: 1}, logger: B}")
    assert tree.plain()["trainer"] == {
        "strategy": {"class_path": "ddp", "init_args": {"x": 1}},
        "callbacks": [{"class_path": "A", "init_args": {"y": 1}}],
        "logger": {"class_path": "B"},
    }
    assert tree_of("trainer: {logger: [A, B], callbacks: null}").plain()["trainer"] == {
        "logger": [{"class_path": "A"}, {"class_path": "B"}],
        "callbacks": None,
    }
    assert tree_of("trainer: {logger: false}").plain() == {"trainer": {"logger": False}}


def test_mappings_are_merged_deeply_and_lists_replaced() -> None:
    first = "module: {class_path: a.B, init_args: {x: 1, y: {p: 1, q: 2}, z: [1, 2]}}"
    second = "module: {init_args: {y: {q: 3}, z: [3]}}\ntrainer: {max_epochs: 1}"
    assert merged(first, second) == (
        {
            "module": {"class_path": "a.B", "init_args": {"x": 1, "y": {"p": 1, "q": 3}, "z": [3]}},
            "trainer": {"max_epochs": 1},
        },
        [],
        [],
    )


def test_another_class_starts_from_its_own_defaults_and_that_is_said() -> None:
    value, _, notes = merged("module: {class_path: a.B, init_args: {x: 1}}", "module: c.D")
    assert value == {"module": {"class_path": "c.D"}}
    assert notes == ["tree.yaml:1: module is now c.D, without the arguments given to a.B at tree.yaml:1."]


@pytest.mark.parametrize(
    ("below", "above"),
    [
        ("proj.py:Mod", "./proj.py:Mod"),
        ("EarlyStopping", "trainer.callbacks.EarlyStopping"),
        ("/there:a.B", "/there/a.py:B"),
    ],
)
def test_spellings_of_one_class(below: str, above: str) -> None:
    for one, other in ((below, above), (above, below)):
        value, _, notes = merged(f"module: {{class_path: {one}, init_args: {{x: 1}}}}", f"module: {other}")
        assert value == {"module": {"class_path": other, "init_args": {"x": 1}}}
        assert notes == []


@pytest.mark.parametrize(("below", "above"), [("a/proj.py:Mod", "b/proj.py:Mod"), ("x.Mod", "y.x.Mod"), ("A", "y.A")])
def test_names_that_end_alike_are_of_two_classes(below: str, above: str) -> None:
    value, _, notes = merged(f"module: {{class_path: {below}, init_args: {{x: 1}}}}", f"module: {above}")
    assert value == {"module": {"class_path": above}}
    assert len(notes) == 1


def test_another_class_of_an_argument_starts_from_its_own_defaults() -> None:
    first = "module: {class_path: a.B, encoder: {class_path: e.CNN, width: 3}}"
    for second in ("{class_path: e.ViT}", "e.ViT"):
        value, problems, notes = merged(first, f"module: {{encoder: {second}}}")
        assert value["module"]["init_args"]["encoder"] == {"class_path": "e.ViT"}
        assert problems == []
        assert notes == [
            "tree.yaml:1: module.encoder is now e.ViT, without the arguments given to e.CNN at tree.yaml:1."
        ]
    for second in ("{width: 7}", "{init_args: {width: 7}}", "{class_path: e.CNN, width: 7}"):
        value, problems, notes = merged(first, f"module: {{encoder: {second}}}")
        assert value["module"]["init_args"]["encoder"] == {"class_path": "e.CNN", "init_args": {"width": 7}}
        assert (problems, notes) == ([], [])


def test_an_empty_section_over_settings_is_reported() -> None:
    first = "module: {class_path: a.B, init_args: {x: 1}}\ndata: c.D\ntrainer: {max_epochs: 3}"
    for name, line in (("trainer", 3), ("module", 1)):
        _, problems, _ = merged(first, f"# empty\n{name}:")
        assert problems == [f"tree.yaml:2: {name} is empty, and replaces the values at tree.yaml:{line}. Remove it."]
    value, problems, _ = merged(first, "data: null")
    assert value["data"] is None
    assert problems == []


def test_a_key_with_nothing_behind_it_is_named(tmp_path: Path) -> None:
    file, found = tmp_path / "run.yaml", Diagnostics()
    file.write_text("data:\nmodule:\n  init_args: # none\ntrainer:\n  callbacks:\n  logger: null\nvars: ~\n")
    read_file(str(file), found)
    assert [note.removeprefix(f"{file}:") for note in found.notes] == [
        *("1: data is empty, which is null.", "3: init_args is empty, which is null."),
        "5: callbacks is empty, which is null.",
    ]


def test_numbers_change_elements_of_a_list() -> None:
    callbacks = "trainer: {callbacks: [{class_path: A, x: 1}, B]}"
    value, _, _ = merged(callbacks, "trainer: {callbacks: {0: {x: 2}}}")
    assert value["trainer"]["callbacks"] == [{"class_path": "A", "init_args": {"x": 2}}, {"class_path": "B"}]
    _, problems, _ = merged(callbacks, "trainer: {callbacks: {2: {x: 2}}}")
    assert problems == [
        "tree.yaml:1: trainer.callbacks.2: there is no such element; the list of the files has 2, numbered from 0."
    ]


def test_an_override_is_a_tree_of_one_value() -> None:
    assert from_override("a.b.c", tree_of("x: 1").value["x"]).plain() == {"a": {"b": {"c": 1}}}  # type: ignore[index]
    assert [is_index(key) for key in (0, "0", "a", True, -1)] == [True, True, False, False, False]


# -- values -----------------------------------------------------------------------------------------------------------


def test_parameters_without_a_usable_annotation_take_anything() -> None:
    class Odd:
        def __init__(self, a, b: NotDefined = 1, *args, c: int, **kwargs) -> None:  # type: ignore # noqa: F821
            pass

    parameters = constructor_parameters(Odd)
    assert {name: (p.annotation, p.default is p.empty) for name, p in parameters.named.items()} == {
        "a": (Any, True),
        "b": (Any, False),
        "c": (int, True),
    }
    assert parameters.open


def test_arguments_are_handed_on_along_the_line_of_the_class_that_is_made() -> None:
    class Base:
        def __init__(self, first: int = 1, second: int = 2) -> None:
            self.values = (first, second)

    class Mixin:
        def __init__(self, depth: int = 1, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    class Plain(Base):
        """Has no constructor."""

    class Mixed(Mixin, Plain):
        def __init__(self, top: int = 0, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Further(Base):
        def __init__(self, *args: Any, extra: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Given(Base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(5, *args, **kwargs)

    for cls, names in (
        (Mixed, {"top", "depth"}),
        (Further, {"extra", "first", "second"}),
        (Given, {"first", "second"}),
        (Mixin, {"depth"}),
    ):
        parameters = constructor_parameters(cls)
        assert (set(parameters.named), parameters.open) == (names, True)


@pytest.mark.parametrize(
    "text",
    [
        "module: a.B\ndatamodule: c.D\n",
        "module: a.B\nseed_everything: 3\n",
        "_target_: a.B\n",
        "defaults: [a]\nmodel: {lr: 1}\n",
    ],
)
def test_keys_of_other_programs_get_ours(text: str) -> None:
    Path("other.yaml").write_text(text)
    with raises_recorded(ConfigError):
        load("other.yaml")
