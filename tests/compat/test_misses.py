"""Words for names that are not here come at the miss: objects are otherwise what `dir`, `pickle` and `copy` expect."""

from __future__ import annotations

import copy
import pickle
import re
from rlcompleter import Completer
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.toy import Toy, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, DataModule, Engine, Trainer, TrainModule
from trainer.callback import Callback
from trainer.callbacks import ModelCheckpoint
from trainer.strategies import STRATEGIES


class Mine(Callback):
    pass


class Data(DataModule):
    pass


MAKE: dict[str, Any] = {
    "Trainer": lambda: quiet(max_steps=1),
    "TrainModule": Toy,
    "DataModule": Data,
    "Callback": Mine,
    "ModelCheckpoint": ModelCheckpoint,
    "Engine": lambda: Engine(accelerator="cpu", devices=1),
    **{kind.__name__: kind for kind in STRATEGIES.values() if "xla" not in kind.__module__},
}
NEEDS_A_RUN = "call fit|inside trainer.fit|inside `with Engine"


def error_of(owner: object, name: str) -> str:
    """Return the words of the error of reading an attribute; "" if it has a value."""
    try:
        getattr(owner, name)
    except (AttributeError, ConfigError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", MAKE)
def test_every_name_that_dir_shows_has_a_value_or_needs_a_run(kind: str) -> None:
    one = MAKE[kind]()
    errors = [error_of(one, name) for name in dir(one) if not name.startswith("_")]
    assert [error for error in errors if error and not re.search(NEEDS_A_RUN, error)] == []


class Answering:
    def __getattr__(self, name: str) -> str:
        if name == "lazy":
            return "made"
        raise AttributeError(name)


@pytest.mark.parametrize("base", [Trainer, DataModule, Callback, STRATEGIES["ddp"]])
def test_another_base_may_answer(base: Any) -> None:
    kind = type("Own", (base, Answering), {})
    assert kind().lazy == "made"
    assert not hasattr(kind(), "eager")


def test_a_callback_may_be_a_module() -> None:
    class Average(Callback, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.net = nn.Linear(1, 1)

    assert Average().net.in_features == 1


def test_a_module_that_asks_another_object_says_that_it_needs_a_run() -> None:
    class Delegates(Toy):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.layer, name)

    assert Delegates().in_features > 0
    with raises_recorded(ConfigError):
        Delegates().log("loss", 1)


def test_an_attribute_that_is_none_in_the_class_can_be_set() -> None:
    trainer = type("Own", (Trainer,), {"fit_loop": None})()
    trainer.fit_loop = 3
    assert trainer.fit_loop == 3


def test_the_tab_key_shows_names_that_are_here() -> None:
    complete, shown = Completer({"t": quiet(max_steps=1)}).complete, []
    while (found := complete("t.a", len(shown))) is not None:
        shown.append(found.removeprefix("t.").partition("(")[0])
    assert shown == ["accumulate_grad_batches", "adopt"]


@pytest.mark.parametrize("kind", MAKE)
def test_a_name_that_is_not_here_is_no_attribute(kind: str) -> None:
    one = MAKE[kind]()
    for name in (
        "val_check_batch",
        "optimizer_frequencies",
        "prepare",
        "CHECKPOINT_JOIN_CHAR",
        "colour",
        "__wrapped__",
    ):
        assert not hasattr(one, name)
        assert getattr(one, name, 7) == 7
    with pytest.raises(AttributeError, match=f"^'{type(one).__name__}' object has no attribute 'colour'$"):
        _ = one.colour


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind != "Engine"])
def test_copies_are_like_the_original(kind: str) -> None:
    one = MAKE[kind]()
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert type(other) is type(one)
        assert vars(other).keys() == vars(one).keys()
        assert not hasattr(other, "val_check_batch")


class Asks(TrainModule):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch if hasattr(self, "scale") else getattr(self, "shift", 2) * batch


def test_a_compiled_forward_may_ask_for_what_is_not_here() -> None:
    compiled: Any = torch.compile(Asks(), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("base", [Trainer, Toy, DataModule, Callback, Engine, STRATEGIES["ddp"]])
def test_an_error_inside_a_property_is_raised_as_it_is(base: Any) -> None:
    class WithProperty(base):  # type: ignore[misc]
        @property
        def fit_loop(self) -> int:
            return self.inner  # type: ignore[no-any-return]

        def __init__(self) -> None:
            super().__init__(**({"accelerator": "cpu"} if base in (Trainer, Engine) else {}))

    with pytest.raises(AttributeError, match="'WithProperty' object has no attribute 'inner'"):
        _ = WithProperty().fit_loop
