"""Annotations of arguments, and what a file's YAML makes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.helpers import annotated
from tests.helpers.project import assert_recorded
from trainer.config.check import Checker
from trainer.config.files import as_node, read_file, read_value, to_yaml
from trainer.config.references import with_references
from trainer.config.specs import instantiate
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node, entries, merge

REFUSED = "refused"
CASES: dict[str, list[str]] = {
    "list[int] | str": ["[1, a]"],
    "dict[str, str] | None": ["{a: [1]}"],
    "PositiveInt | None": ["x", "null"],
    "tuple[int, str]": ["[1]"],
    "bool | int": ["true", "1"],
    "float": ["true", "1e-4", "3E8", "1", ".inf", "inf", ".nan"],
    "int": ["1e6", "1_000", "010", "3.0", "true", "0x1F", "-3", "+3"],
    "bool": ["1", "yes", "on"],
    "str": ["yes", "no", "12", "2024-01-01", "12:30:00", "null", "|\n  a\n  b", "'a: b'"],
    "Optional[str]": ["null", "~", ""],
    "Optional[int]": ["None"],
    "Union[int, str]": ["5", "abc", "'5'"],
    "Union[float, list[float]]": ["[1, 2.5]"],
    "Literal['a', 'b', 1]": ["b", "1", "c"],
    "Color": ["red", "RED"],
    "Num": ["2", "TWO"],
    "IntE": ["2"],
    "list[Color]": ["[red, blue]"],
    "dict[str, Color]": ["{a: red}"],
    "Path": ["data/x", "~/x"],
    "Optional[Path]": ["data/x"],
    "Union[str, Path]": ["data/x"],
    "list[Path]": ["[a, b]"],
    "tuple[int, int]": ["[1, 2]", "[1, 2, 3]"],
    "tuple[int, ...]": ["[1, 2, 3]"],
    "tuple[str, float]": ["[a, 1]"],
    "set[int]": ["[1, 2]"],
    "Sequence[int]": ["[1, 2]"],
    "list[int]": ["3", "[]"],
    "dict[int, str]": ["{1: a}"],
    "dict": ["{a: {b: 1}}"],
    "Dict[str, Any]": ["{a: {b: 1}, class_path: x}"],
    "Inner": [
        "{depth: 3}",
        "{dept: 3}",
        "{class_path: tests.helpers.annotated.Inner, init_args: {depth: 3}}",
        "{class_path: tests.helpers.annotated.InnerSub, init_args: {depth: 1, extra: 2}}",
    ],
    "Outer": ["{name: y, inner: {depth: 5}, inners: [{depth: 1}, {act: gelu}], p: q}"],
    "Optional[Inner]": ["{depth: 3}", "null"],
    "list[Inner]": ["[{depth: 3}]"],
    "dict[str, Inner]": ["{a: {depth: 3}}"],
    "tuple[Inner, Inner]": ["[{depth: 3}, {depth: 4}]", "[{depth: 3}]"],
    "GenDC[int]": ["{item: 3}"],
    "PM": ["{a: 1, b: [1.5]}", "{a: x}"],
    "Optional[PM]": ["{a: 1}"],
    "list[PM]": ["[{a: 1}]"],
    "TD": ["{a: 1}", "{a: x}"],
    "NT": ["{x: 1}", "[1, 2]", "[1, 2, 3]", "[]"],
    "Entry": ["{text: 0042}", "{text: [1]}"],
    "Entry | None": ["abc"],
    "Entry | float": ["1"],
    "nn.Module": [
        "{class_path: torch.nn.ReLU}",
        *("{class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 3}}", "torch.nn.ReLU"),
        "{class_path: tests.helpers.annotated.Net, init_args: {width: 3, act: {class_path: torch.nn.Tanh}}}",
        "{class_path: tests.helpers.annotated.make_net, init_args: {width: 3}}",
        *("{class_path: tests.helpers.annotated.Net.small}", "{class_path: torch.nn.Sequential, init_args: {}}"),
        *("tests.helpers.annotated.make_net", "tests.helpers.annotated.make_text"),
        "tests.helpers.annotated.make_anything",
    ],
    "Optional[nn.Module]": ["{class_path: torch.nn.ReLU}"],
    "list[nn.Module]": ["[{class_path: torch.nn.ReLU}, {class_path: torch.nn.GELU}]"],
    "dict[str, nn.Module]": ["{a: {class_path: torch.nn.ReLU}}"],
    "tuple[nn.Module, nn.Module]": ["[{class_path: torch.nn.ReLU}, {class_path: torch.nn.GELU}]"],
    "tuple[nn.Module, ...]": ["[{class_path: torch.nn.ReLU}]"],
    "Sequence[nn.Module]": ["[{class_path: torch.nn.ReLU}]"],
    "Any": ["{class_path: torch.nn.ReLU}"],
    "list": ["[{class_path: torch.nn.ReLU}]"],
    "Union[nn.Module, str]": ["{class_path: torch.nn.ReLU}", "resnet18"],
    "Union[str, nn.Module]": ["torch.nn.ReLU"],
    "Base": [
        "{class_path: tests.helpers.annotated.Sub, init_args: {a: 3, b: 4}}",
        "{class_path: tests.helpers.annotated.Sub, init_args: {zz: 3}}",
        "{class_path: tests.helpers.annotated.Sub, init_args: {a: x}}",
        "{class_path: torch.nn.ReLU}",
    ],
    "Net": ["{init_args: {width: 3}}", "{width: 3}"],
    "type": ["torch.nn.ReLU", "torch.nn.Rel"],
    "Optional[type]": ["torch.nn.ReLU"],
    "type[Any]": ["torch.nn.ReLU"],
    "typing.Type": ["torch.nn.ReLU"],
    "dict[str, type]": ["{a: torch.nn.ReLU}"],
    "type[nn.Module]": ["torch.nn.ReLU"],
    "torch.optim.Optimizer": ["torch.optim.SGD"],
    "Callable": ["torch.nn.functional.relu"],
    "Callable[[Tensor], Tensor]": ["torch.nn.functional.relu", "{class_path: torch.nn.ReLU}"],
    "Callable[[Iterable], torch.optim.Optimizer]": [
        "torch.optim.AdamW",
        "{class_path: torch.optim.AdamW, init_args: {lr: 0.1}}",
    ],
    "Callable[[], nn.Module]": ["torch.nn.CrossEntropyLoss"],
    "Union[str, Callable]": ["relu"],
    "torch.dtype": ["torch.float16", "float16", "float17", "nn", "torch.tensor", "half"],
    "torch.device": ["cpu", "nowhere"],
    "timedelta": ["'01:30:00'", "PT1H", "30", "{hours: 1}"],
    "datetime": ["2024-01-01T10:00:00"],
    "complex": ["1+2j"],
    "bytes": ["abc"],
    "range": ["[0, 3]"],
    "Decimal": ["1.5"],
    "torch.Tensor": ["[1.0, 2.0]"],
    "np.ndarray": ["[1.0, 2.0]"],
    "'Later'": ["{class_path: tests.helpers.annotated.Later}"],
    "Box[int]": ["{class_path: tests.helpers.annotated.Box, init_args: {x: 1}}"],
    "Proto": ["{class_path: tests.helpers.annotated.Impl}"],
    "Abs": ["{class_path: tests.helpers.annotated.AbsImpl}", "{class_path: tests.helpers.annotated.Abs}"],
    "UserId": ["3"],
    "Annotated[int, 'x']": ["3"],
    "Annotated[int, pydantic.Field(gt=0)]": ["-3"],
    "PositiveInt": ["-3"],
    "Alias": ["[1]"],
    "T": ["3"],
    "int | float | None": ["2.5"],
    "list[int | None] | None": ["[1, null]"],
    "list[list[float]]": ["[[1], [2.5]]"],
    "dict[str, list[int]]": ["{a: [1, 2]}"],
    "dict[str, tuple[int, int]]": ["{a: [1, 2]}"],
    "Union[int, tuple[int, int]]": ["[3, 3]"],
    "Union[Inner, Outer]": ["{name: z}"],
    "Union[Net, Base]": ["{class_path: tests.helpers.annotated.Base, init_args: {a: 3}}"],
    "dict[str, Any]": ["{a: {class_path: torch.nn.ReLU}}"],
    "torch.utils.data.Dataset": ["{class_path: tests.helpers.annotated.DS, init_args: {n: 3}}"],
    "PosOnly": ["{class_path: tests.helpers.annotated.PosOnly, init_args: {a: 1}}"],
    "NewCls": ["{class_path: tests.helpers.annotated.NewCls, init_args: {a: 1}}"],
    "At": ["{a: 1}"],
    "IV": ["{a: 1, b: 2}"],
    "KW": ["{a: 1}"],
    "NoInit": ["{a: 1, c: 5}"],
    "Req": ["{class_path: tests.helpers.annotated.Req}"],
    "dict[str, nn.Module] | None": ["{a: torch.nn.ReLU, b: {class_path: torch.nn.GELU}}"],
    "Mapping[str, DS]": ["{a: {class_path: tests.helpers.annotated.DS, n: 3}}"],
    "tuple[nn.Module, int]": ["[torch.nn.ReLU, 3]"],
    "tuple[str, nn.Module]": ["[a, {class_path: torch.nn.ReLU}]"],
    "tuple[Inner, ...]": ["[{depth: 3}]"],
    "list[list[nn.Module]]": ["[[torch.nn.ReLU], []]"],
    "list[type[nn.Module]]": ["[torch.nn.ReLU]"],
    "set[type[nn.Module]]": ["[torch.nn.ReLU]"],
    "list[nn.Module | str]": ["[{class_path: torch.nn.ReLU}, relu]"],
    "nn.Module | dict[str, Any]": ["{a: 1}", "{class_path: torch.nn.ReLU}"],
    "Dataset[int]": ["{class_path: tests.helpers.annotated.DS, init_args: {n: 3}}"],
    "list[Dataset[int]]": ["[{class_path: tests.helpers.annotated.DS}]"],
    "Iterable[nn.Module]": ["[torch.nn.ReLU]"],
    "Options": ["{net: torch.nn.ReLU, sets: {a: tests.helpers.annotated.DS}}"],
    "Callable[[int], float]": ["tests.helpers.annotated.Impl"],
    "Callable[..., nn.Module]": ["{class_path: tests.helpers.annotated.Net, width: 3, depth: 1}"],
    "Callable[[int], nn.Module]": ["{class_path: tests.helpers.annotated.Req2}"],
    "Color | None": ["BLUE"],
    "Act": ["RELU", "GELU"],
    "list[Act]": ["[PAIR, NONE, none]"],
    "nn.Module | Act": ["PAIR"],
    "Union[Color, str]": ["RED"],
    "dict[Color, int]": ["{red: 1}"],
    "TD2": ["{b: x}"],
    "list[TD]": ["[{a: 1}, {c: 1}]"],
    "Kept": ["{class_path: tests.helpers.annotated.Kept, init_args: {anything: 3}}"],
    "Positional": [
        "{class_path: tests.helpers.annotated.Positional, init_args: {a: 1}}",
        "{class_path: tests.helpers.annotated.Positional, init_args: {b: 1}}",
    ],
}
"""By annotation: values in YAML. What becomes of each is in the snapshot; LightningCLI makes the same of most."""


def value_of(annotation: str, text: str, folder: Path) -> tuple[str, str]:
    """Return what the YAML becomes, or the problem; and the YAML that a run would keep of it."""
    file, found = folder / "case.yaml", Diagnostics()
    file.write_text("v: " + text.replace("\n", "\n  ") + "\n")
    tree = read_file(str(file), found)
    assert tree is not None
    node = entries(tree)["v"]
    value = Checker(found).value(node, annotated.evaluated(annotation), ("module", "v"))
    if not found.problems:
        try:
            made = instantiate(value)
        except Exception as error:
            return REFUSED, str(error)
        shown = re.sub(r"\btests\.helpers\.annotated\.| at 0x\w+", "", f"{type(made).__name__}: {str(made)!r}")
        return shown, to_yaml({"v": node.plain()})
    for problem in found.problems:
        assert str(problem).startswith(f"{file}:1: module.v"), problem
        assert 30 < len(str(problem)) < 1000
    return REFUSED, str(found.problems[0])


@pytest.mark.parametrize(("annotation", "text"), [(name, text) for name, texts in CASES.items() for text in texts])
def test_a_value_is_what_its_annotation_says(annotation: str, text: str, tmp_path: Path) -> None:
    shown, kept = value_of(annotation, text, tmp_path)
    assert_recorded(f"{shown}: {kept}" if shown == REFUSED else shown)
    if shown != REFUSED:
        again = yaml.safe_dump(yaml.safe_load(kept)["v"], default_flow_style=True).strip().removesuffix("\n...")
        if "Path" not in annotation and annotation != "Outer":  # which are absolute then
            assert value_of(annotation, again, tmp_path)[0] == shown


@pytest.mark.parametrize("annotation", ["{}", "list[{}]", "dict[str, {}]", "Optional[{}]", "tuple[{}, int]"])
@pytest.mark.parametrize("kind", ["Path", "Place", "PathModel", "PathFields", "Entry", "deque[Path]"])
def test_a_path_is_absolute_in_the_saved_configuration_wherever_it_stands(
    kind: str, annotation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = {"Path": "{}", "deque[Path]": "[{}]", "Entry": "{{text: a, place: {}}}"}.get(kind, "{{path: {}}}")
    around = {"l": "[{}]", "d": "{{a: {}}}", "t": "[{}, 1]"}.get(annotation[0], "{}")
    shown, kept = value_of(annotation.format(kind), around.format(path.format("data/x")), tmp_path)
    assert shown != REFUSED, kept
    assert str(tmp_path / "data/x") in kept
    shown, problem = value_of(annotation.format(kind), around.format(path.format("s3://b/x")), tmp_path)
    assert (shown, "is a URL, which a Path changes" in problem) == (REFUSED, True)


@pytest.mark.parametrize(
    ("annotation", "below", "above", "expected"),
    [
        ("DS", "tests.helpers.annotated.DS", "{n: 9}", "DS(9)"),
        ("Optional[DS]", "tests.helpers.annotated.DS", "{init_args: {n: 9}}", "DS(9)"),
        ("dict[str, DS]", "{a: tests.helpers.annotated.DS}", "{a: {n: 9}}", "{'a': DS(9)}"),
        ("list[DS]", "[tests.helpers.annotated.DS]", "{0: {n: 9}}", "[DS(9)]"),
        ("Options", "{net: tests.helpers.annotated.Net}", "{net: {width: 9}}", "Options(net=Net(), sets={})"),
        ("Inner", "tests.helpers.annotated.InnerSub", "{extra: 9}", "InnerSub(depth=2, act='relu', extra=9)"),
        ("nn.Module | dict[str, Any]", "tests.helpers.annotated.Net", "{width: 9}", "Net()"),
        ("Callable[..., DS]", "tests.helpers.annotated.DS", "{n: 9}", "functools.partial(<class 'DS'>, n=9)"),
        ("DS", "tests.helpers.annotated.Net", "{class_path: tests.helpers.annotated.DS}", "DS(2)"),
        # A text that is a value is replaced.
        ("Union[str, dict[str, int]]", "tests.helpers.annotated.DS", "{n: 9}", "{'n': 9}"),
        ("Union[str, Inner]", "run.yaml", "{depth: 9}", "Inner(depth=9, act='relu')"),
        ("Any", "tests.helpers.annotated.DS", "{n: 9}", "{'n': 9}"),
    ],
)
def test_a_mapping_over_the_short_form_of_a_class_holds_its_arguments(
    annotation: str, below: str, above: str, expected: str, tmp_path: Path
) -> None:
    found, trees = Diagnostics(), []
    for number, text in enumerate((below, above)):
        file = tmp_path / f"{number}.yaml"
        file.write_text(f"v: {text}\n")
        tree = read_file(str(file), found)
        assert tree is not None
        trees.append(tree)
    tree = with_references(merge(merge(trees[0], trees[1], found), trees[1], found), found)
    node, kind = entries(tree)["v"], annotated.evaluated(annotation)
    made = instantiate(Checker(found).value(node, kind, ("module", "v")))
    assert found.problems == []
    assert re.sub(r"\btests\.helpers\.annotated\.", "", repr(made)) == expected
    assert repr(instantiate(Checker(found).value(as_node(node.plain(), node.source), kind, ("module", "v")))) == repr(
        made
    )


@pytest.mark.parametrize("annotation", ["str", "Union[str, list[str]]", "Union[list[str], Path]", "Any"])
def test_a_typed_dash_is_a_text(annotation: str) -> None:
    found = Diagnostics()
    value = Checker(found).value(read_value("-", "--v"), annotated.evaluated(annotation), ("module", "v"))
    assert (found.problems, str(value)) == ([], "-")


@pytest.mark.parametrize("text", ["#ff0000", "# x", " #1", "#"])
def test_a_typed_comment_is_a_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADE", text)
    referring = with_references(Node({"vars": Node("${env:SHADE}", COMMAND_LINE)}, COMMAND_LINE), Diagnostics())
    for node in (read_value(text, "--v"), entries(referring)["vars"]):
        for annotation, problems in (("Optional[str]", 0), ("Any", 0), ("Optional[float]", 1)):
            found = Diagnostics()
            value = Checker(found).value(node, annotated.evaluated(annotation), ("module", "v"))
            assert (len(found.problems), value) == (problems, value if problems else text)


OF_PROTOCOLS: list[tuple[str, str, str | None]] = [
    *(
        (loss, "Difference", "Difference")
        for loss in ("Loss", "Weighted", "RuntimeLoss", "Loss | None", "Loss | float")
    ),
    *((loss, "difference", "function") for loss in ("Loss", "RuntimeLoss", "Loss | None", "Loss | float")),
    *((loss, "Impl", None) for loss in ("Loss", "RuntimeLoss")),
    *(
        (f"{name} | None", text, None)
        for name in ("Loss", "RuntimeLoss", "Named", "Makes[int]")
        for text in ("3", "[1]", "abc")
    ),
    *((named, "HasName", "HasName") for named in ("Named", "Named | None", "Named | float")),
    ("Makes[int]", "{class_path: torch.optim.SGD, lr: 0.5}", "partial"),
    ("Makes[int]", "torch.optim.SGD", "type"),
    ("type[Named]", "HasName", "type"),
    ("list[Loss]", "[difference, Difference]", "list"),
    ("dict[str, Named | None]", "{a: HasName, b: null}", "dict"),
    ("Named | None", "null", "NoneType"),
]


@pytest.mark.parametrize(("annotation", "text", "expected"), OF_PROTOCOLS)
def test_a_protocol_takes_objects_and_functions(annotation: str, text: str, expected: str | None) -> None:
    """Objects, classes and functions need not be derived from it, nor has it to be runtime_checkable."""
    text = re.sub(r"\b(?=[Dd]ifference|Impl|HasName)", "tests.helpers.annotated.", text)
    found = Diagnostics()
    value = Checker(found).value(read_value(text, "--v"), annotated.evaluated(annotation), ("module", "v"))
    assert expected == (None if found.problems else type(instantiate(value)).__name__)


@pytest.mark.parametrize("annotation", ["Any", "object", "str"])
@pytest.mark.parametrize("text", ["{epoch}-{val_loss:.2f}", "{version}/{x}", "{a}: {b"])
def test_a_template_that_is_not_yaml_is_a_text(annotation: str, text: str) -> None:
    found = Diagnostics()
    value = Checker(found).value(read_value(text, "--v"), annotated.evaluated(annotation), ("module", "v"))
    assert (value, found.problems) == (text, [])


@pytest.mark.parametrize(("annotation", "member"), [("Color.RED", "Color.RED"), ("b'a'", "b'a'")])
def test_a_literal_that_no_file_can_hold_is_refused_in_words(annotation: str, member: str) -> None:
    found = Diagnostics()
    literal = annotated.evaluated(f"Optional[Literal[{annotation}, 'x']]")
    Checker(found).value(read_value("RED", "--v"), literal, ("module", "v"))
    assert f'allowed: {member} (which no file can hold: set it in Python), "x" or null' in found.problems[0].message
