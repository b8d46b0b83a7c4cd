"""Annotations of arguments, and what a file's YAML makes of them: beside LightningCLI 2.6.6 with jsonargparse 4.53."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.helpers import annotated
from tests.messages import raises_recorded
from trainer.config.check import Checker
from trainer.config.files import as_node, read_file, read_value, to_yaml
from trainer.config.references import with_references
from trainer.config.specs import instantiate
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node, entries, merge
from trainer.errors import ConfigError

REFUSED = "refused"
CASES: list[tuple[str, str, str] | tuple[str, str, str, str]] = [
    ("float", "1e-4", "float: '0.0001'"),
    ("float", "3E8", "float: '300000000.0'"),
    ("float", "1", "float: '1.0'"),
    ("int", "1e6", "refused"),
    ("int", "1_000", "int: '1000'"),
    ("int", "010", "int: '10'", "int: '8'"),
    ("int", "3.0", "refused"),
    ("int", "true", "refused"),
    ("bool", "yes", "refused", "bool: 'True'"),
    ("bool", "on", "refused", "bool: 'True'"),
    ("str", "yes", "str: 'yes'", "refused"),
    ("str", "no", "str: 'no'", "refused"),
    ("str", "12", "str: '12'", "refused"),
    ("str", "2024-01-01", "str: '2024-01-01'"),
    ("str", "12:30:00", "str: '12:30:00'", "refused"),
    ("str", "null", "refused", "NoneType: 'None'"),
    ("Optional[str]", "null", "NoneType: 'None'"),
    ("Optional[int]", "None", "refused"),
    ("float", ".inf", "float: 'inf'"),
    ("float", "inf", "refused"),
    ("float", ".nan", "float: 'nan'"),
    ("Union[int, str]", "5", "int: '5'"),
    ("Union[int, str]", "abc", "str: 'abc'"),
    ("Union[int, str]", "'5'", "str: '5'", "int: '5'"),
    ("Union[float, list[float]]", "[1, 2.5]", "list: '[1.0, 2.5]'"),
    ("Literal['a', 'b', 1]", "b", "str: 'b'"),
    ("Literal['a', 'b', 1]", "1", "int: '1'"),
    ("Literal['a', 'b', 1]", "c", "refused"),
    ("Color", "red", "Color: 'Color.RED'", "refused"),
    ("Color", "RED", "Color: 'Color.RED'"),
    ("Num", "2", "Num: 'Num.TWO'", "refused"),
    ("Num", "TWO", "Num: 'Num.TWO'"),
    ("IntE", "2", "IntE: '2'", "refused"),
    ("list[Color]", "[red, blue]", "list: \"[<Color.RED: 'red'>, <Color.BLUE: 'blue'>]\"", "refused"),
    ("dict[str, Color]", "{a: red}", "dict: \"{'a': <Color.RED: 'red'>}\"", "refused"),
    ("Path", "data/x", "PosixPath: 'data/x'"),
    ("Optional[Path]", "data/x", "PosixPath: 'data/x'"),
    ("Union[str, Path]", "data/x", "str: 'data/x'"),
    ("list[Path]", "[a, b]", "list: \"[PosixPath('a'), PosixPath('b')]\""),
    ("tuple[int, int]", "[1, 2]", "tuple: '(1, 2)'"),
    ("tuple[int, ...]", "[1, 2, 3]", "tuple: '(1, 2, 3)'"),
    ("tuple[str, float]", "[a, 1]", "tuple: \"('a', 1.0)\""),
    ("tuple[int, int]", "[1, 2, 3]", "refused"),
    ("set[int]", "[1, 2]", "set: '{1, 2}'"),
    ("Sequence[int]", "[1, 2]", "list: '[1, 2]'"),
    ("list[int]", "3", "refused"),
    ("dict[int, str]", "{1: a}", "dict: \"{1: 'a'}\""),
    ("dict", "{a: {b: 1}}", "dict: \"{'a': {'b': 1}}\""),
    ("Dict[str, Any]", "{a: {b: 1}, class_path: x}", "dict: \"{'a': {'b': 1}, 'class_path': 'x'}\""),
    ("Inner", "{depth: 3}", "Inner: \"Inner(depth=3, act='relu')\""),
    (
        "Outer",
        "{name: y, inner: {depth: 5}, inners: [{depth: 1}, {act: gelu}], p: q}",
        "Outer: \"Outer(name='y', inner=Inner(depth=5, act='relu'), inners=[Inner(depth=1, act='relu'), "
        "Inner(depth=2, act='gelu')], p=PosixPath('q'))\"",
    ),
    ("Optional[Inner]", "{depth: 3}", "Inner: \"Inner(depth=3, act='relu')\""),
    ("Optional[Inner]", "null", "NoneType: 'None'"),
    ("list[Inner]", "[{depth: 3}]", "list: \"[Inner(depth=3, act='relu')]\""),
    ("dict[str, Inner]", "{a: {depth: 3}}", "dict: \"{'a': Inner(depth=3, act='relu')}\""),
    (
        "tuple[Inner, Inner]",
        "[{depth: 3}, {depth: 4}]",
        "tuple: \"(Inner(depth=3, act='relu'), Inner(depth=4, act='relu'))\"",
    ),
    ("Inner", "{dept: 3}", "refused"),
    (
        "Inner",
        "{class_path: tests.helpers.annotated.Inner, init_args: {depth: 3}}",
        "Inner: \"Inner(depth=3, act='relu')\"",
    ),
    ("GenDC[int]", "{item: 3}", "GenDC: 'GenDC(item=3)'"),
    ("PM", "{a: 1, b: [1.5]}", "PM: 'a=1 b=[1.5]'"),
    ("PM", "{a: x}", "refused"),
    ("Optional[PM]", "{a: 1}", "PM: 'a=1 b=[]'"),
    ("list[PM]", "[{a: 1}]", "list: '[PM(a=1, b=[])]'"),
    ("TD", "{a: 1}", "dict: \"{'a': 1}\""),
    ("TD", "{a: x}", "refused"),
    ("NT", "{x: 1}", "NT: 'NT(x=1, y=2)'"),
    ("NT", "[1, 2]", "NT: 'NT(x=1, y=2)'"),
    ("NT", "[1, 2, 3]", REFUSED),
    ("NT", "[]", REFUSED),
    (
        "Tagged",
        "[0042, BLUE, float16]",
        "Tagged: \"Tagged(tag='0042', color=<Color.BLUE: 'blue'>, kind=torch.float16, act=None)\"",
    ),
    (
        "dict[str, Tagged]",
        "{a: {tag: no, act: torch.nn.ReLU}}",
        "dict: \"{'a': Tagged(tag='no', color=<Color.RED: 'red'>, kind=torch.float32, act=ReLU())}\"",
    ),
    ("Entry", "{text: 0042}", "dict: \"{'text': '0042'}\""),
    ("Entry", "{text: [1]}", REFUSED),
    ("Entry | None", "abc", REFUSED),
    ("Entry | float", "1", "float: '1.0'"),
    (
        "WithEntry | None",
        "{name: 1e5, entry: {text: no}}",
        "WithEntry: \"WithEntry(name='1e5', entry={'text': 'no'})\"",
    ),
    ("list[WithEntry]", "[abc]", REFUSED),
    ("Tagged | list[int]", "[1, 2]", "list: '[1, 2]'"),
    ("nn.Module", "{class_path: torch.nn.ReLU}", "ReLU: 'ReLU()'"),
    (
        "nn.Module",
        "{class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 3}}",
        "Linear: 'Linear(in_features=2, out_features=3, bias=True)'",
    ),
    ("Optional[nn.Module]", "{class_path: torch.nn.ReLU}", "ReLU: 'ReLU()'"),
    ("nn.Module", "torch.nn.ReLU", "ReLU: 'ReLU()'"),
    (
        "list[nn.Module]",
        "[{class_path: torch.nn.ReLU}, {class_path: torch.nn.GELU}]",
        "list: \"[ReLU(), GELU(approximate='none')]\"",
    ),
    ("dict[str, nn.Module]", "{a: {class_path: torch.nn.ReLU}}", "dict: \"{'a': ReLU()}\""),
    (
        "tuple[nn.Module, nn.Module]",
        "[{class_path: torch.nn.ReLU}, {class_path: torch.nn.GELU}]",
        "tuple: \"(ReLU(), GELU(approximate='none'))\"",
    ),
    ("tuple[nn.Module, ...]", "[{class_path: torch.nn.ReLU}]", "tuple: '(ReLU(),)'"),
    ("Sequence[nn.Module]", "[{class_path: torch.nn.ReLU}]", "list: '[ReLU()]'"),
    (
        "nn.Module",
        "{class_path: tests.helpers.annotated.Net, init_args: {width: 3, act: {class_path: torch.nn.Tanh}}}",
        "Net: 'Net(\\n  (act): Tanh()\\n)'",
    ),
    ("Any", "{class_path: torch.nn.ReLU}", "ReLU: 'ReLU()'"),
    ("Any", "{class_path: torch.nn.ReLU}", "ReLU: 'ReLU()'"),
    ("list", "[{class_path: torch.nn.ReLU}]", "list: \"[{'class_path': 'torch.nn.ReLU'}]\""),
    ("Union[nn.Module, str]", "{class_path: torch.nn.ReLU}", "ReLU: 'ReLU()'"),
    ("Union[nn.Module, str]", "resnet18", "str: 'resnet18'"),
    ("Union[str, nn.Module]", "torch.nn.ReLU", "str: 'torch.nn.ReLU'", "ReLU: 'ReLU()'"),
    ("Base", "{class_path: tests.helpers.annotated.Sub, init_args: {a: 3, b: 4}}", "Sub: 'Sub()'"),
    ("Base", "{class_path: tests.helpers.annotated.Sub, init_args: {zz: 3}}", "refused"),
    ("Base", "{class_path: tests.helpers.annotated.Sub, init_args: {a: x}}", "refused"),
    ("Base", "{class_path: torch.nn.ReLU}", "refused"),
    ("Net", "{init_args: {width: 3}}", "refused", "Net: 'Net()'"),
    ("Net", "{width: 3}", "refused", "Net: 'Net()'"),
    ("type", "torch.nn.ReLU", "type: \"<class 'torch.nn.modules.activation.ReLU'>\""),
    ("Optional[type]", "torch.nn.ReLU", "type: \"<class 'torch.nn.modules.activation.ReLU'>\""),
    ("type[Any]", "torch.nn.ReLU", "type: \"<class 'torch.nn.modules.activation.ReLU'>\""),
    ("typing.Type", "torch.nn.ReLU", "type: \"<class 'torch.nn.modules.activation.ReLU'>\""),
    ("dict[str, type]", "{a: torch.nn.ReLU}", "dict: \"{'a': <class 'torch.nn.modules.activation.ReLU'>}\""),
    ("type", "torch.nn.Rel", "refused"),
    ("type[nn.Module]", "torch.nn.ReLU", "type: \"<class 'torch.nn.modules.activation.ReLU'>\""),
    ("torch.optim.Optimizer", "torch.optim.SGD", "refused"),
    ("Callable", "torch.nn.functional.relu", "function: '<function relu>'"),
    ("Callable[[Tensor], Tensor]", "torch.nn.functional.relu", "function: '<function relu>'"),
    ("Callable[[Tensor], Tensor]", "{class_path: torch.nn.ReLU}", "ReLU: 'ReLU()'", "refused"),
    (
        "Callable[[Iterable], torch.optim.Optimizer]",
        "torch.optim.AdamW",
        "type: \"<class 'torch.optim.adamw.AdamW'>\"",
        "partial: 'functools.partial(<function call_without_instantiate_context>, <jsonargp'",
    ),
    (
        "Callable[[Iterable], torch.optim.Optimizer]",
        "{class_path: torch.optim.AdamW, init_args: {lr: 0.1}}",
        "partial: \"functools.partial(<class 'torch.optim.adamw.AdamW'>, lr=0.1)\"",
        "partial: 'functools.partial(<function call_without_instantiate_context>, <jsonargp'",
    ),
    (
        "Callable[[], nn.Module]",
        "torch.nn.CrossEntropyLoss",
        "type: \"<class 'torch.nn.modules.loss.CrossEntropyLoss'>\"",
        "partial: 'functools.partial(<function call_without_instantiate_context>, <jsonargp'",
    ),
    ("Union[str, Callable]", "relu", "str: 'relu'"),
    ("torch.dtype", "torch.float16", "dtype: 'torch.float16'"),
    ("torch.dtype", "float16", "dtype: 'torch.float16'", "refused"),
    ("torch.device", "cpu", "device: 'cpu'", "refused"),
    ("timedelta", "'01:30:00'", "timedelta: '1:30:00'"),
    ("timedelta", "PT1H", "timedelta: '1:00:00'", "refused"),
    ("timedelta", "30", "refused"),
    ("timedelta", "{hours: 1}", "refused"),
    ("datetime", "2024-01-01T10:00:00", "datetime: '2024-01-01 10:00:00'", "refused"),
    ("complex", "1+2j", "complex: '(1+2j)'"),
    ("bytes", "abc", "bytes: \"b'abc'\"", "refused"),
    ("range", "[0, 3]", "refused"),
    ("Decimal", "1.5", "Decimal: '1.5'"),
    ("torch.Tensor", "[1.0, 2.0]", "refused"),
    ("np.ndarray", "[1.0, 2.0]", "refused"),
    ("'Later'", "{class_path: tests.helpers.annotated.Later}", "Later: '<Later object>'"),
    ("Box[int]", "{class_path: tests.helpers.annotated.Box, init_args: {x: 1}}", "Box: '<Box object>'"),
    ("Proto", "{class_path: tests.helpers.annotated.Impl}", "Impl: '<Impl object>'"),
    ("Abs", "{class_path: tests.helpers.annotated.AbsImpl}", "AbsImpl: '<AbsImpl object>'"),
    ("Abs", "{class_path: tests.helpers.annotated.Abs}", "refused"),
    ("UserId", "3", "int: '3'"),
    ("Annotated[int, 'x']", "3", "int: '3'"),
    ("Annotated[int, pydantic.Field(gt=0)]", "-3", "refused"),
    ("PositiveInt", "-3", "refused"),
    ("Alias", "[1]", "list: '[1]'"),
    ("T", "3", "int: '3'"),
    ("int | float | None", "2.5", "float: '2.5'"),
    ("list[int | None] | None", "[1, null]", "list: '[1, None]'"),
    ("list[list[float]]", "[[1], [2.5]]", "list: '[[1.0], [2.5]]'"),
    ("dict[str, list[int]]", "{a: [1, 2]}", "dict: \"{'a': [1, 2]}\""),
    ("dict[str, tuple[int, int]]", "{a: [1, 2]}", "dict: \"{'a': (1, 2)}\""),
    ("Union[int, tuple[int, int]]", "[3, 3]", "tuple: '(3, 3)'"),
    (
        "Union[Inner, Outer]",
        "{name: z}",
        "Outer: \"Outer(name='z', inner=Inner(depth=2, act='relu'), inners=[], p=None)\"",
    ),
    ("Union[Net, Base]", "{class_path: tests.helpers.annotated.Base, init_args: {a: 3}}", "Base: 'Base()'"),
    ("dict[str, Any]", "{a: {class_path: torch.nn.ReLU}}", "dict: \"{'a': ReLU()}\""),
    ("nn.Module", "{class_path: tests.helpers.annotated.make_net, init_args: {width: 3}}", "Net: 'Net()'"),
    ("nn.Module", "{class_path: tests.helpers.annotated.Net.small}", "Net: 'Net()'"),
    ("torch.utils.data.Dataset", "{class_path: tests.helpers.annotated.DS, init_args: {n: 3}}", "DS: 'DS(3)'"),
    ("PosOnly", "{class_path: tests.helpers.annotated.PosOnly, init_args: {a: 1}}", "refused"),
    ("nn.Module", "{class_path: torch.nn.Sequential, init_args: {}}", "Sequential: 'Sequential()'"),
    ("NewCls", "{class_path: tests.helpers.annotated.NewCls, init_args: {a: 1}}", "NewCls: '<NewCls object>'"),
    ("At", "{a: 1}", "At: 'At(a=1)'"),
    ("IV", "{a: 1, b: 2}", "IV: 'IV(a=1)'"),
    ("KW", "{a: 1}", "KW: 'KW(a=1)'"),
    ("NoInit", "{a: 1, c: 5}", "refused"),
    (
        "Inner",
        "{class_path: tests.helpers.annotated.InnerSub, init_args: {depth: 1, extra: 2}}",
        "InnerSub: \"InnerSub(depth=1, act='relu', extra=2)\"",
        "refused",
    ),
    ("Req", "{class_path: tests.helpers.annotated.Req}", "refused"),
    ("str", "|\n  a\n  b", "str: 'a\\nb\\n'"),
    ("int", "0x1F", "int: '31'"),
    ("int", "-3", "int: '-3'"),
    ("int", "+3", "int: '3'"),
    ("str", "'a: b'", "str: 'a: b'"),
    ("Optional[str]", "~", "NoneType: 'None'"),
    ("Path", "~/x", "PosixPath: '~/x'"),
    ("Optional[str]", "", "NoneType: 'None'"),
    ("list[int]", "[]", "list: '[]'"),
    # Of these jsonargparse 4.53 was not asked.
    (
        "dict[str, nn.Module] | None",
        "{a: torch.nn.ReLU, b: {class_path: torch.nn.GELU}}",
        "dict: \"{'a': ReLU(), 'b': GELU(approximate='none')}\"",
    ),
    ("Mapping[str, DS]", "{a: {class_path: tests.helpers.annotated.DS, n: 3}}", "dict: \"{'a': DS(3)}\""),
    ("tuple[nn.Module, int]", "[torch.nn.ReLU, 3]", "tuple: '(ReLU(), 3)'"),
    ("tuple[str, nn.Module]", "[a, {class_path: torch.nn.ReLU}]", "tuple: \"('a', ReLU())\""),
    ("tuple[Inner, ...]", "[{depth: 3}]", "tuple: \"(Inner(depth=3, act='relu'),)\""),
    ("tuple[Inner, Inner]", "[{depth: 3}]", REFUSED),
    ("list[list[nn.Module]]", "[[torch.nn.ReLU], []]", "list: '[[ReLU()], []]'"),
    ("list[type[nn.Module]]", "[torch.nn.ReLU]", "list: \"[<class 'torch.nn.modules.activation.ReLU'>]\""),
    ("set[type[nn.Module]]", "[torch.nn.ReLU]", "set: \"{<class 'torch.nn.modules.activation.ReLU'>}\""),
    ("list[nn.Module | str]", "[{class_path: torch.nn.ReLU}, relu]", "list: \"[ReLU(), 'relu']\""),
    ("nn.Module | dict[str, Any]", "{a: 1}", "dict: \"{'a': 1}\""),
    ("nn.Module | dict[str, Any]", "{class_path: torch.nn.ReLU}", "ReLU: 'ReLU()'"),
    ("Dataset[int]", "{class_path: tests.helpers.annotated.DS, init_args: {n: 3}}", "DS: 'DS(3)'"),
    ("list[Dataset[int]]", "[{class_path: tests.helpers.annotated.DS}]", "list: '[DS(2)]'"),
    ("Iterable[nn.Module]", "[torch.nn.ReLU]", "list: '[ReLU()]'"),
    (
        "Options",
        "{net: torch.nn.ReLU, sets: {a: tests.helpers.annotated.DS}}",
        "Options: \"Options(net=ReLU(), sets={'a': DS(2)})\"",
    ),
    ("nn.Module", "tests.helpers.annotated.make_net", "Net: 'Net()'"),
    ("nn.Module", "tests.helpers.annotated.make_text", REFUSED),
    ("nn.Module", "tests.helpers.annotated.make_anything", REFUSED),
    ("Callable[[int], float]", "tests.helpers.annotated.Impl", REFUSED),
    ("Callable[..., nn.Module]", "{class_path: tests.helpers.annotated.Net, width: 3, depth: 1}", REFUSED),
    ("Callable[[int], nn.Module]", "{class_path: tests.helpers.annotated.Req2}", REFUSED),
    ("torch.dtype", "float17", REFUSED),
    ("torch.dtype", "nn", REFUSED),
    ("torch.dtype", "torch.tensor", REFUSED),
    ("torch.dtype", "half", "dtype: 'torch.float16'"),
    ("torch.device", "nowhere", REFUSED),
    ("Color | None", "BLUE", "Color: 'Color.BLUE'"),
    ("Act", "RELU", "Act: 'Act.RELU'"),
    ("list[Act]", "[PAIR, NONE, none]", "list: \"[<Act.PAIR: (1, 2)>, <Act.NONE: 'none'>, <Act.NONE: 'none'>]\""),
    ("nn.Module | Act", "PAIR", "Act: 'Act.PAIR'"),
    ("Act", "GELU", REFUSED),
    ("Union[Color, str]", "RED", "str: 'RED'"),
    ("dict[Color, int]", "{red: 1}", "dict: \"{<Color.RED: 'red'>: 1}\""),
    ("TD2", "{b: x}", REFUSED),
    ("list[TD]", "[{a: 1}, {c: 1}]", REFUSED),
    ("Kept", "{class_path: tests.helpers.annotated.Kept, init_args: {anything: 3}}", "Kept: \"Kept({'anything': 3})\""),
    ("Positional", "{class_path: tests.helpers.annotated.Positional, init_args: {a: 1}}", REFUSED),
    (
        "Positional",
        "{class_path: tests.helpers.annotated.Positional, init_args: {b: 1}}",
        "Positional: 'Positional(5, 1)'",
    ),
]
"""The annotation, the YAML, the value here, and LightningCLI's where that is another one."""


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


@pytest.mark.parametrize(("annotation", "text", "expected"), [case[:3] for case in CASES])
def test_a_value_is_what_its_annotation_says(annotation: str, text: str, expected: str, tmp_path: Path) -> None:
    shown, kept = value_of(annotation, text, tmp_path)
    assert shown == expected, kept
    if shown != REFUSED:
        again = yaml.safe_dump(yaml.safe_load(kept)["v"], default_flow_style=True).strip().removesuffix("\n...")
        if "Path" not in annotation and annotation != "Outer":  # which are absolute then
            assert value_of(annotation, again, tmp_path)[0] == expected


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
    *((loss, "Impl", None) for loss in ("Loss", "RuntimeLoss", "Named", "Named | None")),
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
def test_a_protocol_takes_what_has_its_members(annotation: str, text: str, expected: str | None) -> None:
    """Objects, classes and functions need not be derived from it, nor has it to be runtime_checkable."""
    text = re.sub(r"\b(?=[Dd]ifference|Impl|HasName)", "tests.helpers.annotated.", text)
    found = Diagnostics()
    value = Checker(found).value(read_value(text, "--v"), annotated.evaluated(annotation), ("module", "v"))
    if expected is None and not found.problems:
        with raises_recorded(ConfigError):
            instantiate(value)
    else:
        assert expected == (None if found.problems else type(instantiate(value)).__name__)


@pytest.mark.parametrize(("annotation", "member"), [("Color.RED", "Color.RED"), ("b'a'", "b'a'")])
def test_a_literal_that_no_file_can_hold_is_refused_in_words(annotation: str, member: str) -> None:
    found = Diagnostics()
    literal = annotated.evaluated(f"Optional[Literal[{annotation}, 'x']]")
    Checker(found).value(read_value("RED", "--v"), literal, ("module", "v"))
    assert f'allowed: {member} (which no file can hold: set it in Python), "x" or null' in found.problems[0].message


def test_what_lightning_takes_is_taken_or_refused_in_words() -> None:
    """Where LightningCLI makes another value of a text, YAML 1.2 or the annotation says ours."""
    others = {(case[0], case[1]) for case in CASES if len(case) == 4 and case[2] != REFUSED != case[3]}
    assert others == {
        ("int", "010"),
        ("Union[int, str]", "'5'"),
        ("Union[str, nn.Module]", "torch.nn.ReLU"),
        ("Callable[[Iterable], torch.optim.Optimizer]", "torch.optim.AdamW"),
        ("Callable[[Iterable], torch.optim.Optimizer]", "{class_path: torch.optim.AdamW, init_args: {lr: 0.1}}"),
        ("Callable[[], nn.Module]", "torch.nn.CrossEntropyLoss"),
    }
