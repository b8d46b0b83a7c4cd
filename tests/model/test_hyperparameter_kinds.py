"""What `save_hyperparameters` keeps comes back from a checkpoint with the same values and types."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import random
import shutil
import sys
from argparse import Namespace
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pydantic
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.alike import alike
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from tests.tiers import Inputs
from trainer import CheckpointError, ConfigError, DataModule, TrainModule
from trainer.callbacks import CSVLogger, JSONLLogger, TensorBoardLogger
from trainer.checkpoint.deserialization import deserialize, from_json, to_json
from trainer.checkpoint.serialization import serialize
from trainer.hyperparameters import (
    MAX_DEPTH,
    as_given,
    construct,
    constructor_arguments,
    encoded_hyperparameters,
    entries_of,
)

try:
    from omegaconf import DictConfig
except ImportError:
    DictConfig = dict  # the tests are skipped


class Color(enum.Enum):
    RED = "red"
    BLUE = ("b", 2)
    LAYER = torch.nn.ReLU


# Of the name of `Color`, as of another module that this one has imported.
OTHER: Any = enum.Enum("Color", {"RED": "dark red", "GREEN": "green"}, module="elsewhere", qualname="Color")


class Flags(enum.Flag):
    A = 1
    B = 2


class Unit(float):
    def __init__(self, number: float) -> None:
        self.unit = "m"


class Numbers(list[Any]):
    pass


class Unique(set[Any]):
    pass


class Pair(tuple[Any, ...]):
    pass


class Table(dict[str, Any]):
    pass


class Delta(datetime.timedelta):
    pass


@dataclasses.dataclass
class Initial:
    width: int = 1
    more: dataclasses.InitVar[int] = 2

    def __post_init__(self, more: int) -> None:
        self.sum = self.width + more


@dataclasses.dataclass(init=False)
class Halved:
    width: float

    def __init__(self, double: float) -> None:
        self.width = double / 2


class PydanticModel(pydantic.BaseModel):
    width: int = 1


class Located:
    def __fspath__(self) -> str:
        return "a"


class Point(NamedTuple):
    x: Any
    y: Any = 2


@dataclasses.dataclass
class Inner:
    width: int = 1
    of: Any = None
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made = self.width * 2


@dataclasses.dataclass
class Scaled:
    rate: float = 0.5
    scale: float = 10.0

    def __post_init__(self) -> None:
        self.rate *= self.scale


@dataclasses.dataclass
class Adds:
    width: int = 1

    def __post_init__(self) -> None:
        self.own, self.of, self.layer = [self], {"sizes": (1, 2)}, torch.nn.ReLU()


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    names: tuple[str, ...] = ()


class Model(TrainModule):
    def __init__(self, value: Any = None, text: str | Path = "x", color: str | Color = "red") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.given = value
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(DataModule):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.given = value

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 1))


def again(value: Any, **more: Any) -> Model:
    """Return a module that was loaded from the checkpoint of a run with this value."""
    trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
    trainer.fit(Model(value, **more), datamodule=Data(value))
    shutil.rmtree("saved", ignore_errors=True)
    trainer.save_checkpoint("saved")
    assert alike(Data.load_from_checkpoint("saved").given, value)
    return Model.load_from_checkpoint("saved")


class Positional(Model):
    def __init__(self, width: int, *widths: int, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.given = (width, widths, rate)


class First(Model):
    def __init__(self, width: int, rate: float = 0.1, /, deep: int = 1, **more: Any) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters()
        self.given, self.layer = (width, rate, deep, more), torch.nn.Linear(1, 1)


class Passes(Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)


class PassesAll(Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.save_hyperparameters()


@pytest.mark.parametrize(
    "module",
    [
        *(Positional(1), Positional(1, rate=0.5), Positional(1, 2, 3, rate=0.5)),
        *(First(1), First(1, 0.5, deep=3), First(1, 0.5, 3, x=4)),
        *(Passes(4), Passes(4, Path("y")), PassesAll(4), PassesAll(4, text=Path("y"))),
    ],
    ids=lambda module: f"{type(module).__name__} {module.given}",
)
def test_arguments_by_position_come_back(module: Any) -> None:
    trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
    trainer.fit(module, DataLoader(torch.ones(2, 1)))
    trainer.save_checkpoint("saved")
    loaded = type(module).load_from_checkpoint("saved")
    assert (loaded.given, loaded.hparams) == (module.given, module.hparams)


class Sizes(Model):
    def __init__(self, *sizes: int, rate: float = 0.1, **more: Any) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((lambda: Sizes(4, 8), "sizes"), (lambda: Sizes(4, x=3), "sizes")),
        *((lambda: Sizes(rate=3, x=3), None), (lambda: PassesAll(4, "b", color=1), None)),
    ],
)
def test_values_that_no_name_holds_are_named(
    make: Callable[[], Model], name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    make()
    assert caplog.text.count("checkpoints do not contain them") == (name is not None)
    assert f"the hyperparameters {name} (UserList) are not data" in caplog.text or name is None


def test_those_by_position_beside_others_by_name_can_be_given() -> None:
    found = constructor_arguments(Sizes, {"rate": 0.2, "x": 3}, None, {"sizes": (4, 8)}, {})
    assert construct(Sizes, found).hparams == {**found, "sizes": [4, 8]}


def test_one_by_position_that_was_not_saved_is_given_by_name() -> None:
    class Half(First):
        def __init__(self, width: int, rate: float = 0.1, /) -> None:
            super().__init__(0)
            self.hparams.clear()
            self.given = (width, rate)

    trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
    trainer.fit(Half(1), DataLoader(torch.ones(2, 1)))
    trainer.save_checkpoint("saved")
    with raises_recorded(CheckpointError):
        Half.load_from_checkpoint("saved")
    assert Half.load_from_checkpoint("saved", width=4).given == (4, 0.1)


LEAVES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([None, True, 1, -0.5, "a", "", "s3://bucket/x", "red"]),
    lambda rng: Path(rng.choice(["a", "/b/c", "~/d", "x y"])),
    lambda rng: rng.choice([PurePosixPath("a/b"), PureWindowsPath("c:/d")]),
    lambda rng: rng.choice([*Color, *OTHER, *Flags, Flags.A | Flags.B]),
    lambda rng: datetime.timedelta(rng.randrange(9), rng.randrange(9), rng.randrange(999)),
    lambda rng: rng.choice([range(3), range(9, 0, -2), torch.Size([2, 3])]),
    lambda rng: rng.choice([torch.float16, torch.int64, torch.device("cpu"), torch.device("cuda:1")]),
]


def drawn(rng: random.Random, depth: int = 0) -> Any:
    """Return data of any kind that has a form in a checkpoint."""
    if depth == 3 or rng.random() < 0.3:
        return rng.choice(LEAVES)(rng)
    items = [drawn(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    keys = [rng.choice(["k", 3, Color.RED, (1, "x"), range(2)]), "other", 5]
    return rng.choice(
        [
            lambda: items,
            lambda: tuple(items),
            lambda: dict(zip(keys, items, strict=False)),
            lambda: Point(items[0], items[-1]),
            lambda: Inner(3, items[0]),
            lambda: Scaled(2.0),
            lambda: OrderedDict(zip(keys, items, strict=False)),
            lambda: Counter("abca"),
            lambda: deque(items),
            lambda: Outer(Inner(2, items[0]), ("a", "b")),
            lambda: {rng.choice(LEAVES)(rng) for _ in range(2)},
            lambda: frozenset({1, "a"}),
        ]
    )()


def test_drawn_values_come_back_with_their_types(inputs: Inputs) -> None:
    for rng in inputs:
        value = drawn(rng)
        found = again(value).given
        assert alike(found, value), (rng.seed_given, value, found)  # type: ignore[attr-defined]


NO_DATA: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([torch.nn.ReLU, len, torch.nn.ReLU(), object(), lambda: 1, b"x", UserList([1])]),
    lambda rng: rng.choice([{frozenset({1}): 2}, {Path("a"): 1, "a": 2}, Unique({1}), UserDict()]),
    lambda rng: itself(),
    lambda rng: nested(rng.choice([MAX_DEPTH + 1, 60, 200])),
    lambda rng: Unset.__new__(Unset),
]


@dataclasses.dataclass
class Unset:
    """Without `__init__` its field has no value, so that reading it is an error."""

    width: int


def itself() -> Any:
    values: list[Any] = []
    values.append(values)
    return values


def nested(depth: int) -> Any:
    value: Any = Path("a")
    for _ in range(depth):
        value = (value,)
    return value


def test_check_and_writer_agree_on_what_is_data(inputs: Inputs, caplog: pytest.LogCaptureFixture) -> None:
    for rng in inputs:
        data = drawn(rng)
        others = rng.choice(NO_DATA)(rng)
        if rng.random() < 0.5:
            others = rng.choice([lambda x: [1, x], lambda x: {"k": (1, x)}, lambda x: Point(x), lambda x: Inner(1, x)])(
                others
            )
        given = {"data": data, "others": others, "deep": nested(MAX_DEPTH)}
        stored, kinds, problems = encoded_hyperparameters(given)
        assert [*problems] == ["others"], (rng.seed_given, given)  # type: ignore[attr-defined]
        entry = {"module": stored, "data": {}, "kinds": {"module": kinds}}
        kept = deserialize(from_json(to_json(serialize(entry, "hyperparameters").data), "x"), lambda info: info, "x")
        found = {
            name: as_given(one, kept["kinds"]["module"].get(name), Model, name)
            if name in kept["kinds"]["module"]
            else one
            for name, one in kept["module"].items()
        }
        assert alike(found, {"data": data, "deep": given["deep"]}), (rng.seed_given, data)  # type: ignore[attr-defined]


class Updates(Model):
    """Puts objects into `hparams`, as packages do."""

    def __init__(self, value: Any = 1, loss: Any = None) -> None:
        super().__init__()
        self.hparams.update({"loss": torch.nn.ReLU, "sizes": [1, {"of": len}], "rate": 0.5})
        self.hparams["device"] = torch.device("cpu")
        self.hparams.own = object()

    def on_train_epoch_end(self) -> None:
        self.hparams.found = torch.nn.ReLU()


class UpdatesData(Data):
    def __init__(self, value: Any = 1) -> None:
        super().__init__()
        self.hparams.encoder = {"of": torch.nn.ReLU}


def test_objects_in_hparams_are_kept_in_memory_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, data = Updates(), UpdatesData()
    with pytest.MonkeyPatch.context() as patch:
        seen: list[str] = []
        patch.setattr(Updates, "on_train_start", lambda self: seen.append(caplog.text))
        trainer = quiet(
            max_epochs=3,
            default_root_dir=tmp_path,
            enable_checkpointing=True,
            logger=[CSVLogger(), JSONLLogger(), TensorBoardLogger()],
        )
        trainer.fit(module, datamodule=data)
    at_start = "the hyperparameters loss (type), sizes[1]['of'] (builtin_function_or_method), own (object) are not data"
    assert at_start in seen[0]
    assert "UpdatesData: the hyperparameters encoder['of'] (type) are not data" in seen[0]
    assert caplog.text.count("are not data") == 3
    assert "the hyperparameters found (ReLU) are not data" in caplog.text
    assert (module.hparams.loss, module.hparams.sizes[1]["of"]) == (torch.nn.ReLU, len)
    logged = json.loads((trainer.run_dir / "hparams.json").read_text())
    assert {**logged["module"], **logged["data"]} == {
        "value": 1,
        "text": "x",
        "color": "red",
        "rate": 0.5,
        "device": "cpu",
    }
    trainer.save_checkpoint(tmp_path / "saved")
    assert caplog.text.count("are not data") == 3
    caplog.clear()
    again = Updates.load_from_checkpoint(tmp_path / "saved")
    assert "does not contain loss, so the defaults are used" in caplog.text
    assert again.hparams.keys() == module.hparams.keys() - {"found"}
    Updates.load_from_checkpoint(tmp_path / "saved", loss=torch.nn.ReLU)
    assert caplog.text.count("defaults are used") == 1


class Needs(Model):
    def __init__(self, kind: Any, rate: float = 0.1) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters("kind", rate=rate, more=kind)
        self.layer, self.given = kind(1, 1), kind


def test_values_that_are_asked_for_by_name_may_be_objects() -> None:
    trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
    trainer.fit(Needs(torch.nn.Linear), DataLoader(torch.ones(2, 1)))
    trainer.save_checkpoint("saved")
    with raises_recorded(CheckpointError):
        Needs.load_from_checkpoint("saved")
    assert Needs.load_from_checkpoint("saved", kind=torch.nn.Linear).given is torch.nn.Linear


@pytest.mark.parametrize("more", [False, True])
def test_an_object_inside_of_a_configuration_is_asked_for(more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Several, "calls", (keep_whole, keep_n) if more else (keep_whole,))
    cfg = {"net": torch.nn.Linear, "deep": 2}
    trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
    trainer.fit(Several(cfg), DataLoader(torch.ones(2, 1)))
    trainer.save_checkpoint("saved")
    with raises_recorded(CheckpointError):
        Several.load_from_checkpoint("saved")
    assert Several.load_from_checkpoint("saved", net=torch.nn.Linear).given[0] == cfg
    assert Several.load_from_checkpoint("saved", cfg=cfg).given[0] is cfg


def test_objects_in_a_configuration_of_omegaconf_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason='needs omegaconf: pip install "exact-trainer[dev]"')
    cfg = omegaconf.OmegaConf.create({"net": {"of": torch.nn.Linear}, "lr": 0.1}, flags={"allow_objects": True})
    for kind in (Configured, InOne):
        caplog.clear()
        trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
        trainer.fit(kind(cfg), DataLoader(torch.ones(2, 1)))
        trainer.save_checkpoint(kind.__name__)
        assert caplog.text.count("are not data") == 1
        with raises_recorded(CheckpointError):
            kind.load_from_checkpoint(kind.__name__)
        assert kind.load_from_checkpoint(kind.__name__, cfg=cfg).given in (cfg, (cfg, None))


def test_texts_stay_texts_beside_paths_and_enumerations() -> None:
    module = again(None, text="https://host/a.bin", color="red")
    assert (module.hparams.text, module.hparams.color) == ("https://host/a.bin", "red")
    module = again(None, text=Path("a"), color=Color.RED)
    assert (module.hparams.text, module.hparams.color) == (Path("a"), Color.RED)
    module = again([Color.LAYER], color=Color.LAYER)
    assert (module.given, module.hparams.color) == ([Color.LAYER], Color.LAYER)


def test_a_class_that_is_not_there_is_asked_for() -> None:
    again([Inner(1)])
    path = Path("saved/checkpoint.json")
    content = path.read_text()
    assert ':Inner"' in content
    state = json.loads(content.replace(':Inner"', ':Elsewhere"'))
    kept = state["hyperparameters"]
    with raises_recorded(CheckpointError):
        constructor_arguments(Model, kept["module"], None, {}, kept["kinds"]["module"])
    found = constructor_arguments(Model, kept["module"], None, {"value": 3}, kept["kinds"]["module"])
    assert found["value"] == 3


class Whole(Model):
    def __init__(self, config: Scaled | None) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters(config)
        self.given = config
        self.layer = torch.nn.Linear(1, 1)


class Untyped(Whole):
    def __init__(self, config) -> None:  # type: ignore[no-untyped-def]
        super().__init__(config)


@pytest.mark.parametrize("cls", [Whole, Untyped])
def test_a_dataclass_of_all_hyperparameters_comes_back(cls: type[Whole]) -> None:
    trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
    trainer.fit(cls(Scaled(2.0)), DataLoader(torch.ones(2, 1)))
    trainer.save_checkpoint("saved")
    found = cls.load_from_checkpoint("saved").given
    assert (found.rate, found.scale) == (20.0, 10.0)
    assert cls.load_from_checkpoint("saved", scale=3.0).given.scale == 3.0
    assert cls.load_from_checkpoint("saved", config=Scaled(1.0)).given.rate == 10.0
    assert isinstance(found, Scaled) == (cls is Whole)


def test_a_field_that_a_dataclass_has_got_since_has_its_default() -> None:
    again(Scaled(2.0))
    content = Path("saved/checkpoint.json").read_text()
    kept = json.loads(content)["hyperparameters"]
    del kept["module"]["value"]["scale"]
    found = constructor_arguments(Model, kept["module"], None, {}, kept["kinds"]["module"])
    assert alike(found["value"].scale, 10.0)


@pytest.mark.parametrize(
    "value",
    [
        *(defaultdict(list), ChainMap({"a": 1}), UserDict(a=1), UserList([1]), UserString("a"), MappingProxyType({})),
        *(Numbers([1]), Unique({1}), Pair((1, 2)), Table(a=1), Delta(1), Unique({Numbers}), array("i", [1])),
        *(
            np.str_("a"),
            Located(),
            PydanticModel(),
            {"a": PydanticModel()},
            {Pair((1, 2)): 3},
            Initial(1, 30),
            Halved(3),
            Unit(1),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_made_again_is_named(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    Model([value])
    assert caplog.text.count("the hyperparameters value[0]") == caplog.text.count("are not data") == 1


def test_spans_of_time_come_back_exactly() -> None:
    spans = [datetime.timedelta(99999, 0, 1), datetime.timedelta.max, datetime.timedelta(-400000, 0, 7)]
    assert alike(again(spans).given, spans)


def test_what_was_added_to_a_dataclass_comes_back() -> None:
    given = Adds(3)
    given.of["sizes"], given.name, given.folder = (3, 4), "x", Path("a")  # type: ignore[attr-defined]
    found: Any = again(given).given
    assert (found.width, found.of, found.name, found.folder) == (3, {"sizes": (3, 4)}, "x", Path("a"))
    assert found.own == [found]


def test_namespaces_come_back() -> None:
    given = Namespace(path=Path("a"), inner=SimpleNamespace(color=Color.RED), many=[Namespace(a=1)])
    assert alike(again(given).given, given)


class Configured(Model):
    def __init__(self, cfg: Any, part: Any = None) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters()
        self.given, self.layer = (cfg, part), torch.nn.Linear(1, 1)


class InOne(Model):
    def __init__(self, cfg: DictConfig) -> None:  # type: ignore[valid-type]
        TrainModule.__init__(self)
        self.save_hyperparameters(cfg)
        self.given, self.layer = cfg, torch.nn.Linear(1, 1)


class Several(Model):
    """Keeps its configuration as a whole, and other values beside it, in several calls."""

    calls: tuple[Callable[[Several, Any], None], ...] = ()

    def __init__(self, cfg: Any = None, n: int = 1, part: Scaled = Scaled(), width: int = 2) -> None:  # noqa: B008
        TrainModule.__init__(self)
        for call in self.calls:
            call(self, locals())
        self.given, self.layer = (cfg, n, part), torch.nn.Linear(1, 1)


class SeveralOfDataclass(Several):
    def __init__(self, config: Inner = Inner(), n: int = 1, part: Scaled = Scaled()) -> None:  # noqa: B008
        super().__init__(config, n, part)


def keep_whole(module: Several, at: dict[str, Any]) -> None:
    module.save_hyperparameters(at["cfg"])


def keep_part(module: Several, at: dict[str, Any]) -> None:
    module.save_hyperparameters(at["part"])


def keep_whole_and_more(module: Several, at: dict[str, Any]) -> None:
    module.save_hyperparameters(at["cfg"], commit="abc")


def keep_n(module: Several, at: dict[str, Any]) -> None:
    module.save_hyperparameters("n")


def keep_more(module: Several, at: dict[str, Any]) -> None:
    module.save_hyperparameters({"commit": "abc"})


def keep_all(module: Several, at: dict[str, Any]) -> None:
    module.save_hyperparameters()


OTHERS = (keep_n, keep_part, keep_more, keep_all, keep_whole_and_more)


@pytest.mark.parametrize(
    "calls",
    [
        *permutations((keep_whole, keep_n, keep_part)),
        *product((keep_whole,), OTHERS),
        *product(OTHERS, (keep_whole,)),
        (keep_whole_and_more,),
    ],
)
@pytest.mark.parametrize(
    ("kind", "cfg"),
    [
        (Several, Namespace(width=7, of={"a": Path("b")})),
        (SeveralOfDataclass, Inner(7, Color.RED)),
    ],
)
def test_a_whole_configuration_comes_back_beside_other_values(
    kind: type[Several], cfg: Any, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of the calls; the argument is that of the outermost constructor."""
    monkeypatch.setattr(Several, "calls", calls)
    found = loaded(kind(cfg, n=5, part=Scaled(0.1))).given
    assert entries_of(found[0]) == entries_of(cfg)
    assert kind is Several or type(found[0]) is Inner
    kept_n, kept_part = ({keep_all, one} & {*calls} for one in (keep_n, keep_part))
    assert found[1] == (5 if kept_n else 1)
    assert alike(found[2], Scaled(0.1) if kept_part else Scaled())


def test_a_name_that_two_calls_keep_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Several, "calls", (keep_whole, keep_n))
    assert loaded(Several({"n": 5, "width": 3}, n=5)).given[:2] == ({"n": 5, "width": 3}, 5)
    assert "two calls" not in caplog.text
    Several({"n": 4}, n=5)
    assert (
        "two calls of save_hyperparameters keep a value of the name n: load_from_checkpoint will give the last, 5"
        in caplog.text
    )


def loaded(module: Model) -> Any:
    trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
    trainer.fit(module, DataLoader(torch.ones(2, 1)))
    trainer.save_checkpoint("saved")
    return type(module).load_from_checkpoint("saved")


def test_configurations_of_omegaconf_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason='needs omegaconf: pip install "exact-trainer[dev]"')
    create = omegaconf.OmegaConf.create
    cfg = create(
        {
            "lr": 0.1,
            "data": {"n": 3, "path": Path("a")},
            "twice": "${data.n}",
            "to_come": "???",
            4: [1, {"c": Color.RED}],
        }
    )
    omegaconf.OmegaConf.set_struct(cfg, True)
    part = create({"data": {"n": 3}, "model": {"width": "${data.n}", "own": "${.width}"}}).model
    module = loaded(Configured(cfg, part=[part, create([1, {"a": None}])]))
    found, (inner, several) = module.given
    assert (type(found), type(several)) == (omegaconf.DictConfig, omegaconf.ListConfig)
    assert omegaconf.OmegaConf.to_container(found) == omegaconf.OmegaConf.to_container(cfg)  # as written
    assert (found.twice, module.hparams.cfg.lr, found.data.path, found[4][1].c) == (3, 0.1, Path("a"), Color.RED)
    assert omegaconf.OmegaConf.is_struct(found)
    assert (inner.width, inner.own) == (3, 3)  # of a part the rest is not there
    assert several == [1, {"a": None}]
    kept = json.loads(Path("saved/checkpoint.json").read_text())["hyperparameters"]
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with raises_recorded(CheckpointError):
        constructor_arguments(Configured, {"part": kept["module"]["part"]}, None, {"cfg": 1}, kept["kinds"]["module"])


def test_a_configuration_of_omegaconf_with_all_hyperparameters_comes_back() -> None:
    omegaconf = pytest.importorskip("omegaconf", reason='needs omegaconf: pip install "exact-trainer[dev]"')
    module = loaded(InOne(omegaconf.OmegaConf.create({"lr": 0.1, "net": {"sizes": [1, {"a": 2}], "lr": "${lr}"}})))
    assert module.given == omegaconf.OmegaConf.create({"lr": 0.1, "net": {"sizes": [1, {"a": 2}], "lr": 0.1}})
    assert type(module.given) is omegaconf.DictConfig
    assert module.hparams.net.sizes[1].a == 2
    with raises_recorded(ConfigError):
        InOne(omegaconf.OmegaConf.create([1]))


def test_configurations_of_transformers_come_back_with_what_was_added() -> None:
    transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')

    class Pretrained(Configured):
        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)

    Pretrained.__init__.__annotations__["cfg"] = transformers.PretrainedConfig
    given = transformers.GPT2Config(n_embd=8, num_labels=3, more=4)
    given.added = "x"
    found = loaded(Pretrained(given)).given[0]
    assert type(found) is transformers.GPT2Config
    assert found.to_dict() == given.to_dict()
    assert (found.added, found.more, found.num_labels) == ("x", 4, 3)


class Ignores(Model):
    def __init__(self, value: Any, loss: Any = None) -> None:
        super().__init__(value)
        self.save_hyperparameters(ignore=["loss"])


def test_what_a_base_class_has_named_is_not_named_again(caplog: pytest.LogCaptureFixture) -> None:
    found = loaded(Ignores(3, loss=torch.nn.ReLU()))
    assert found.given == 3
    assert caplog.text.count("the hyperparameters loss (ReLU) are not data") == 1


def test_a_deque_keeps_its_largest_length() -> None:
    assert [again(deque([1, Path("a")], maxlen=size)).given.maxlen for size in (None, 2, 5)] == [None, 2, 5]


def test_a_configuration_of_a_class_of_its_own_has_the_same_kinds_before_and_after() -> None:
    given = UserDict(size=3, deep=UserDict(rate=0.5), many=UserList([UserDict(a=1)]))
    module = Untyped(given)
    trainer = quiet(max_steps=1, default_root_dir="runs", enable_checkpointing=False)
    trainer.fit(module, DataLoader(torch.ones(2, 1)))
    trainer.save_checkpoint("saved")
    found = Untyped.load_from_checkpoint("saved")
    assert (found.given.deep.rate, found.given.many[0].a) == (0.5, 1)
    assert alike(found.hparams, module.hparams)


def test_a_long_range_takes_no_time() -> None:
    assert again(range(10**12)).given == range(10**12)
