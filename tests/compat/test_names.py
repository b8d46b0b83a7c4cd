"""Every public name of the installed Lightning is here, is another name here, or is answered in words."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, DataModule, Engine, Trainer, TrainModule
from trainer.callback import Callback
from trainer.callbacks import (
    AdvancedProfiler,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from trainer.compat.names import HOMES, MODULES, NAMES, STRATEGY_ALIASES, TRAINER_ARGUMENTS, VIEWED, WORDS
from trainer.errors import ArgumentError
from trainer.precision import resolve_precision
from trainer.strategies import SingleDeviceStrategy

lightning = pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lightning-names.md"


def classes() -> dict[str, type]:
    found = [lightning.LightningModule, lightning.LightningDataModule, lightning.Trainer]
    found += [import_module("pytorch_lightning.strategies").ParallelStrategy]
    for name in ("callbacks", "loggers", "profilers"):
        module = import_module(f"pytorch_lightning.{name}")
        found += [getattr(module, one) for one in module.__all__ if inspect.isclass(getattr(module, one))]
    return {kind.__name__: kind for kind in found}


def ours(name: str) -> Any:
    """Return this package's class; None if it is answered in words."""
    target = HOMES.get(name, f"trainer.callbacks:{name}")
    if " " in NAMES.get(name, ""):
        return None
    home, _, attribute = target.partition(":")
    return getattr(import_module(home), attribute, None)


def names_of(kind: type) -> set[str]:
    bases = {"LightningModule": nn.Module, "LightningDataModule": object, "Trainer": object}
    base: Any = bases.get(kind.__name__, object)
    for one in (lightning.Callback, import_module("pytorch_lightning.loggers").Logger):
        if kind is not one and issubclass(kind, one):
            base = one
    return {name for name in dir(kind) if not name.startswith("_") and name not in dir(base)}


@pytest.mark.parametrize("name", [name for name, kind in classes().items() if issubclass(kind, lightning.Callback)])
def test_hooks_of_callbacks_take_lightnings_arguments_by_name(name: str) -> None:
    """A callback that contains another one calls its hooks with trainer= and pl_module=."""
    for hook in dir(lightning.Callback):
        theirs, own = getattr(classes()[name], hook), getattr(ours(name), hook, None)
        given = inspect.signature(theirs).parameters if inspect.isfunction(theirs) else ()
        if "pl_module" in given and own is not None:
            inspect.signature(own).bind_partial(**dict.fromkeys(one for one in given if one.strip("_")))


OTHER_PLACES = {
    "Logger.log_text": "the second is a text, or the columns, by the others' types",
    "Profiler.setup": "a hook of a callback: profilers are callbacks",
    "Profiler.teardown": "the same",
}
"""Methods whose arguments have other places than Lightning's, and why."""


def by_place(function: Any) -> list[str]:
    """Return the names of the arguments that a method takes by position; none where it takes any number."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name not in ("self", "cls")]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return []
    return [
        "model" if one.name == "module" else one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD
    ]


@pytest.mark.parametrize("name", [name for name in classes() if name != "ParallelStrategy" and ours(name) is not None])
def test_arguments_by_position_are_lightnings(name: str) -> None:
    theirs, here = classes()[name], ours(name)
    excused = {row.partition(".")[2] for row in OTHER_PLACES if issubclass(here, ours(row.partition(".")[0]))}
    for method in names_of(theirs) - excused:
        expected, own = getattr(theirs, method), getattr(here, method, None)
        if inspect.isroutine(expected) and inspect.isroutine(own) and (places := by_place(own)):
            assert places[: len(by_place(expected))] == by_place(expected), method
    expected, own = by_place(theirs.__init__), by_place(here.__init__)
    assert own == expected[: len(own)]
    if issubclass(here, Callback) and here.__init__ is not object.__init__:
        with pytest.raises(ConfigError):  # by its type or its name
            here(*[object()] * len(expected or [1]))
        with raises_recorded(ConfigError):
            here(*[None] * (len(expected) + 1))


def test_arguments_by_position(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", 0.0, 3, True, "max")
    assert (stopping.verbose, stopping.mode) == (True, "max")
    assert ModelCheckpoint(tmp_path, None, "val_loss", True, None, 2, False, False, "max").save_top_k == 2
    assert AdvancedProfiler(tmp_path, "name", 1.0, True).dump_stats
    with raises_recorded(ArgumentError):
        AdvancedProfiler(tmp_path, "name", 1.0, False, dump_stats=True)
    with raises_recorded(ArgumentError):
        AdvancedProfiler(tmp_path, "name", 1.0, False, 1)
    with raises_recorded(ArgumentError):
        LambdaCallback(None, None, print)
    with raises_recorded(ArgumentError):
        TrainModule(1, 2)
    with raises_recorded(ArgumentError):
        DataModule(1)
    for call in (quiet(max_steps=1).validate, quiet(max_steps=1).test):
        call(Toy(), loader(2), None, False, None, True)
    assert quiet(max_steps=1).predict(Toy(), loader(2), None, False, None, True) is None
    quiet(max_steps=1).fit(Toy(), loader(2), None, None, None, False)


def is_answered(name: str, row: str, kind: Any) -> bool:
    """Whether a row of a class is a name here, an alias, or words."""
    method, _, argument = row.rstrip(")").partition("(")
    words = {**WORDS.get(name, {}), **({f"({one})": "" for one in TRAINER_ARGUMENTS} if name == "Trainer" else {})}
    aliases = STRATEGY_ALIASES if name == "ParallelStrategy" else {}
    if row in words or method in words or method in aliases or VIEWED.get(method) == name:
        return True
    if not argument:
        return hasattr(kind, method) or method in vars(kind) or method in assigned(kind)
    parameters = inspect.signature(getattr(kind, method) if method else kind.__init__).parameters
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return argument in parameters or (anything and kind.__init__ is not object.__init__)


def assigned(kind: type) -> str:
    """Return the source of a class and its bases, in which attributes are assigned."""
    return " ".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("trainer."))


def rows_of(name: str) -> Iterator[str]:
    """Yield the members of a class of Lightning's, and the arguments of its constructor and methods."""
    kind = classes()[name]
    members = names_of(kind)
    yield from members
    methods = members if name in ("LightningModule", "LightningDataModule", "Trainer") else ()
    for method in ("__init__" if "__init__" in vars(kind) else "", *methods):
        if method and inspect.isroutine(getattr(kind, method)):
            for one in inspect.signature(getattr(kind, method)).parameters.values():
                if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and one.name != "self":
                    yield f"{method.removeprefix('__init__')}({one.name})"


@pytest.mark.parametrize("name", ["LightningModule", "LightningDataModule", "Trainer"])
def test_every_name_of_a_class_is_here_or_answered(name: str) -> None:
    kind = ours(name)
    assert [row for row in rows_of(name) if not is_answered(name, row, kind)] == []


def test_words_are_given_by_attribute_errors() -> None:
    from trainer.callbacks import PredictionWriter

    objects: dict[str, Any] = {
        "Trainer": Trainer(logger=False),
        "ParallelStrategy": Trainer(logger=False).strategy,
        "ModelCheckpoint": ModelCheckpoint(),
        "PredictionWriter": PredictionWriter("predictions"),
        "LightningModule": TrainModule(),
        "LightningDataModule": DataModule(),
    }
    for name, owner in objects.items():
        for member, words in WORDS.get(name, {}).items():
            if member.isidentifier() and not callable(inspect.getattr_static(owner, member, None)):
                assert not hasattr(owner, member)
                with pytest.raises(AttributeError) as refused:
                    getattr(owner, member)
                assert f"Use {words}." in str(refused.value)


@pytest.mark.parametrize("name", [name for name in WORDS if name not in ("Engine", "ParallelStrategy")])
def test_words_are_given_for_arguments_of_constructors(name: str) -> None:
    for row in WORDS[name]:
        if row.startswith("("):
            with raises_recorded(ArgumentError):
                ours(name)(**{row[1:-1]: object()})


@pytest.mark.parametrize("hook", ["training_epoch_end", "validation_end", "on_epoch_end"])
def test_methods_that_lightning_1_called_are_refused(hook: str) -> None:
    module = type("Mine", (Toy,), {hook: lambda self, *args: None})()
    with raises_recorded(ConfigError):
        quiet(max_steps=1).fit(module, loader(2))


def test_attributes_of_a_run_are_distinguished_from_unknown_ones_before_it() -> None:
    strategy = Trainer(logger=False).strategy
    for name in ("model", "lightning_module", "root_device", "module"):
        with pytest.raises(AttributeError, match="exists from the start of a run"):
            getattr(strategy, name)


def test_what_cannot_be_set_is_reported() -> None:
    trainer = Trainer(logger=False)
    for name, words in {
        "max_epochs": r"give Trainer\(max_epochs=...\)",
        "logger": r"give Trainer\(logger=...\)",
        "optimizers": "it follows from the run",
        "fit_loop": "Use the Trainer's arguments",
        "model": "it is the same as module",
    }.items():
        with pytest.raises(AttributeError, match=f"Trainer.{name} cannot be set: .*{words}"):
            setattr(trainer, name, None)
    trainer.mine = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "hook",
    [
        "def backward(self, use_amp, loss, optimizer): ...",
        "def optimizer_step(self, a, b, c, optimizer_i, closure=None): ...",
    ],
)
def test_hooks_of_lightning_1_are_refused(hook: str) -> None:
    found: dict[str, Any] = {}
    exec(hook, found)
    module = type("Mine", (Toy,), found)()
    with raises_recorded(ConfigError):
        quiet(max_steps=1).fit(module, loader(2))


def test_pages_that_words_name_show_the_class() -> None:
    texts = [
        *NAMES.values(),
        *TRAINER_ARGUMENTS.values(),
        *(text for words in WORDS.values() for text in words.values()),
    ]
    named = [text for text in texts if "see the page" in text]
    assert named
    for text in named:
        class_name, page_name = re.findall(r"[A-Z]\w+", text)[0], text.split("'")[1]
        shown = (PAGE.parent / f"{page_name}.md").read_text()
        assert f"({class_name})" in shown or f"{class_name}(" in shown, text


def members_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_members_of_strategies_are_here_or_answered_in_words() -> None:
    strategy = SingleDeviceStrategy()
    strategy.setup_environment("cpu", resolve_precision("32-true"))
    strategy.module = TrainModule()
    assert (strategy.world_size, strategy.is_global_zero, strategy.root_device.type) == (1, True, "cpu")
    with pytest.raises(AttributeError, match=r"attribute 'model_to_device'. Use strategy.setup_module"):
        _ = strategy.model_to_device
    with pytest.raises(AttributeError, match=r"^'SingleDeviceStrategy' object has no attribute 'colour'$"):
        _ = strategy.colour


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TQDMProgressBar, "init_train_tqdm"),
        (ModelCheckpoint, "format_checkpoint_name"),
        (StochasticWeightAveraging, "update_parameters"),
    ],
)
def test_an_override_that_lightning_would_call_is_refused(kind: Any, name: str) -> None:
    def method(self: Any, *args: Any) -> None: ...

    plug = type("Mine", (kind,), {name: method})(**({"swa_lrs": 0.1} if kind is StochasticWeightAveraging else {}))
    with raises_recorded(ConfigError):
        Trainer(callbacks=[plug], logger=False)


def test_overrides_of_strategies_and_plugins_are_refused() -> None:
    def method(self: Any, *args: Any) -> None: ...

    strategy = type("Mine", (SingleDeviceStrategy,), {"model_to_device": method, "own_helper": method})()
    with raises_recorded(ConfigError):
        Trainer(strategy=strategy, logger=False)
    plugin = type("Mine", (import_module("trainer.plugins").MixedPrecision,), {"optimizer_step": method})
    with raises_recorded(ConfigError):
        Trainer(plugins=[plugin("bf16-mixed", "cpu")], logger=False)


def test_members_of_plugins_are_answered_in_words() -> None:
    for name in ("MixedPrecision", "LightningEnvironment"):
        plugin = getattr(import_module("trainer.plugins"), name)("bf16-mixed")
        assert not hasattr(plugin, "teardown")
        with pytest.raises(AttributeError, match=f"{name} has no attribute 'teardown': .* Use trainer"):
            plugin.teardown()


def test_the_engine_answers_the_names_of_fabric_and_accelerate() -> None:
    fabric = import_module("lightning_fabric").Fabric
    engine = Engine(accelerator="cpu", devices=1)
    accelerate = ("prepare", "accumulate", "gather_for_metrics", "unwrap_model", "is_main_process", "save_state")
    for name in {*members_of(fabric), *accelerate}:
        if not hasattr(Engine, name) and name not in vars(engine):
            with pytest.raises(AttributeError, match="Use "):
                getattr(engine, name)


def test_lightnings_defaults_of_what_is_not_here_may_be_given() -> None:
    Trainer(barebones=False, model_registry=None, enable_autolog_hparams=True, logger=False)  # type: ignore[arg-type]
    ModelCheckpoint(enable_version_counter=True)  # type: ignore[call-arg]
    with raises_recorded(ConfigError):
        Trainer(barebones=True, logger=False)  # type: ignore[arg-type]
    with raises_recorded(ConfigError):
        ModelCheckpoint(enable_version_counter=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("package", ["", ".loggers", ".profilers", ".utilities", ".pytorch", ".callbacks"])
def test_an_import_of_all_names_takes_those_that_lightning_exports(package: str) -> None:
    found: dict[str, Any] = {}
    exec(f"from trainer{package} import *", found)
    theirs = set(import_module(f"pytorch_lightning{package.replace('.pytorch', '')}").__all__)
    here = {name for name in theirs if " " not in NAMES.get(name, "") and ":" in NAMES.get(name, ":")}
    assert here - found.keys() <= {"Checkpoint", *MODULES}  # a base class without members, and modules


def test_the_version_is_found_at_lightnings_place() -> None:
    from trainer import __version__

    assert import_module("trainer.__about__").__version__ == __version__
    assert import_module("trainer.pytorch.__about__").__version__ == __version__


def test_every_module_of_lightning_can_be_imported() -> None:
    for name in MODULES:
        assert import_module(f"trainer.{name}") is not None


def test_every_target_exists() -> None:
    for target in NAMES.values():
        home, _, name = target.partition(":")
        assert " " in target or not name or hasattr(import_module(home), name), target


def test_the_page_shows_the_table() -> None:
    page = runpy.run_path(str(PAGE.parent / "names_pages.py"))["page"]
    assert page() == PAGE.read_text(), "write the output of: python docs/names_pages.py lightning"
