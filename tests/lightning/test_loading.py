"""`strict_loading`, `strict=` and `map_location=` mean what they mean in Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import torch
from torch import nn

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library
from tests.helpers.toy import loader
from trainer import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning", "ignore::FutureWarning")


def net_of(library: Library) -> Any:
    class Net(library.Module):  # type: ignore[misc]
        """Layers by name, all of ones; a checkpoint has other numbers."""

        def __init__(self, layers: Any = ("body", "head")) -> None:
            super().__init__()
            self.save_hyperparameters()
            for name in layers:
                setattr(self, name, nn.Linear(4, 1))
            for parameter in self.parameters():
                nn.init.ones_(parameter)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(layer(batch[0]).square().mean() for layer in self.children())

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net


def trainer_of(library: Library, folder: Path, **settings: Any) -> Any:
    off = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing", "num_sanity_val_steps"), False
    )
    return library.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, **{**off, "num_sanity_val_steps": 0, **settings}
    )


@pytest.fixture(params=[LIGHTNING, OURS], ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def written(library: Library, tmp_path: Path) -> Path:
    """A checkpoint of a module with `body` and `head`."""
    path = tmp_path / "trained.ckpt"
    trainer = trainer_of(library, tmp_path, max_steps=1)
    trainer.fit(net_of(library)(), loader(1))
    trainer.save_checkpoint(path)
    return path


OTHER = {"layers": ("body", "extra")}
"""A module that lacks `head`, and whose `extra` the checkpoint lacks."""


def loaded(module: Any) -> dict[str, bool]:
    """Return which layers are not the ones they were made with."""
    return {name: not bool((child.weight == 1).all()) for name, child in module.named_children()}


def on_instance(module: Any) -> Any:
    module.strict_loading = False
    return module


def on_class(kind: Any) -> Any:
    return type("Lenient", (kind,), {"strict_loading": False})


@pytest.mark.parametrize("where", ["instance", "class"])
def test_not_strict_by_the_module(where: str, library: Library, written: Path, tmp_path: Path) -> None:
    kind = net_of(library) if where == "instance" else on_class(net_of(library))
    module = on_instance(kind(**OTHER)) if where == "instance" else kind(**OTHER)
    assert module.strict_loading is False
    trainer_of(library, tmp_path).validate(module, loader(1), ckpt_path=written, **weights_only(library))
    assert loaded(module) == {"body": True, "extra": False}


def weights_only(library: Library) -> dict[str, Any]:
    return {"weights_only": False} if library.is_lightning else {}


def test_strict_by_default(library: Library, written: Path, tmp_path: Path) -> None:
    module = net_of(library)(**OTHER)
    assert module.strict_loading is True
    with pytest.raises((RuntimeError, CheckpointError), match="extra"):
        trainer_of(library, tmp_path).validate(module, loader(1), ckpt_path=written, **weights_only(library))


def test_not_strict_in_a_resumed_fit(library: Library, written: Path, tmp_path: Path) -> None:
    class Frozen(net_of(library)):  # type: ignore[misc]
        """Its `extra` is not trained, and no checkpoint has it."""

        strict_loading = False

        def __init__(self) -> None:
            super().__init__(("body", "head", "extra"))
            self.extra.requires_grad_(False)

        def state_dict(self, *args: Any, **options: Any) -> Any:
            state = super().state_dict(*args, **options)
            return {name: value for name, value in state.items() if not name.startswith("extra")}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    module = Frozen()
    trainer = trainer_of(library, tmp_path, max_steps=2)
    trainer.fit(module, loader(2), ckpt_path=written, **weights_only(library))
    assert trainer.global_step == 2
    assert loaded(module) == {"body": True, "head": True, "extra": False}
    trainer.save_checkpoint(tmp_path / "second")
    again = trainer_of(library, tmp_path, max_steps=3)
    again.fit(module, loader(2), ckpt_path=tmp_path / "second", **weights_only(library))
    assert again.global_step == 3


@pytest.mark.parametrize(
    ("of_module", "argument", "is_strict"),
    [(None, None, True), (None, False, False), (None, True, True), (False, None, False), (False, False, False)],
)
def test_load_from_checkpoint(
    of_module: bool | None, argument: bool | None, is_strict: bool, library: Library, written: Path
) -> None:
    class Net(net_of(library)):  # type: ignore[misc]
        def __init__(self, layers: Any) -> None:
            super().__init__(layers)
            if of_module is not None:
                self.strict_loading = of_module

    def load() -> Any:
        return Net.load_from_checkpoint(written, strict=argument, **OTHER, **weights_only(library))

    if is_strict:
        with pytest.raises((RuntimeError, CheckpointError), match="extra"):
            load()
    else:
        assert loaded(load()) == {"body": True, "extra": False}


@pytest.mark.parametrize("of_module", [False, True])
def test_a_contradiction_is_refused(of_module: bool, library: Library, written: Path) -> None:
    class Net(net_of(library)):  # type: ignore[misc]
        def __init__(self, layers: Any) -> None:
            super().__init__(layers)
            self.strict_loading = of_module

    with pytest.raises((ValueError, ConfigError), match=f"strict={not of_module}.*strict_loading={of_module}"):
        Net.load_from_checkpoint(written, strict=not of_module, **OTHER, **weights_only(library))


MAP_LOCATIONS: dict[str, tuple[Any, str]] = {
    "text": ("cpu", "cpu"),
    "device": (torch.device("cpu"), "cpu"),
    "another device": (torch.device("meta"), "meta"),
    "dict": ({"cpu": "meta"}, "meta"),
    "dict without the place": ({"cuda:0": "cuda:1"}, "cpu"),
    "empty dict": ({}, "cpu"),
    "function": (lambda storage, location: storage, "cpu"),
    "function that leaves it": (lambda storage, location: None, "cpu"),
    "function that asks": (lambda storage, location: storage if location == "cpu" else None, "cpu"),
    "function that moves": (lambda storage, location: torch.UntypedStorage(storage.nbytes(), device="meta"), "meta"),
}


@pytest.mark.parametrize("name", MAP_LOCATIONS)
def test_map_location(name: str, library: Library, written: Path) -> None:
    given, device = MAP_LOCATIONS[name]
    if device == "meta" and library.is_lightning:
        return  # it copies the weights from there; this machine has no other device
    module = net_of(library).load_from_checkpoint(written, map_location=given, **weights_only(library))
    assert {str(parameter.device) for parameter in module.parameters()} == {device}
    if device == "cpu":
        assert loaded(module) == {"body": True, "head": True}


def no_device(storage: Any, location: str) -> Any:
    raise KeyError(location)


WRONG: list[Any] = ["cdua", "cuda:0", 0, ["cpu"], {"cpu": "cdua"}, {"cpu": "cuda:0"}, {"cdua": "cpu"}, no_device]
WRONG += [lambda storage: storage, lambda storage, location: "cuda"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda:0 is right here")
@pytest.mark.parametrize("given", WRONG, ids=range(len(WRONG)))
def test_a_wrong_map_location_is_refused_before_anything_is_loaded(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"map_location=.*Give a device such as"):
        net_of(OURS).load_from_checkpoint("there is no such folder", map_location=given)
