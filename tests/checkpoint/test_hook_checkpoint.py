"""The keys of a user's hooks in a checkpoint are his, whatever the trainer calls its own entries."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.alike import alike
from tests.helpers.compare import assert_same_bits
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback
from trainer.callbacks import EMAWeightAveraging, ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.cli.main import main
from trainer.loop.training_state import KINDS

OWN = sorted({*(name.removesuffix("?") for name in KINDS), "step", "epoch", "global_step", "info", "base"} - {"model"})
ODD = ["val/acc", "my key", "état", "Model", "", "$tensor", "a.b", "x" * 300]
VALUE = {"number": 0.5, "tensor": torch.arange(3.0), "list": [1, None, "text"]}


class Keeps(Callback):
    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.read: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(dict.fromkeys(self.keys, VALUE))

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.read = {key: checkpoint[key] for key in self.keys if key in checkpoint}


class OfTheModule(Toy):
    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.keys = keys
        self.read: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(dict.fromkeys(self.keys, VALUE))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read = {key: checkpoint[key] for key in self.keys if key in checkpoint}


def train(
    epochs: int, root: Path, of_callback: list[str], of_module: list[str], seed: int | None = None
) -> tuple[Keeps, OfTheModule]:
    torch.manual_seed(1)
    callback, module = Keeps(of_callback), OfTheModule(of_module)
    callbacks = [callback, EMAWeightAveraging(decay=0.5), ModelCheckpoint()]
    trainer = quiet(max_epochs=epochs, seed=seed, callbacks=callbacks, enable_checkpointing=True, default_root_dir=root)
    trainer.fit(module, loader(4, shuffle=True), ckpt_path="last")
    return callback, module


@pytest.mark.parametrize("keys", [OWN, OWN[::-1], ODD], ids=["the trainer's", "backwards", "odd"])
def test_keys_of_hooks_do_not_replace_the_trainers(keys: list[str], tmp_path: Path) -> None:
    half = len(keys) // 2
    for epochs in (1, 2):  # the resumed run has the seed of the checkpoint
        callback, module = train(epochs, tmp_path / "broken", keys[:half], keys[half:])
    seed = read_checkpoint(tmp_path / "broken/version_0/checkpoints/epoch=1-step=8")["seed"]
    _, expected = train(2, tmp_path / "whole", [], [], seed)
    assert_same_bits(module.state_dict(), expected.state_dict())
    read = {**callback.read, **module.read}
    assert read.keys() == set(keys)
    for value in read.values():
        assert (value["number"], value["list"]) == (0.5, [1, None, "text"])
        assert torch.equal(value["tensor"], VALUE["tensor"])


class Halves(Toy):
    """Leaves the bias out of its checkpoints, and reads it as zero."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {
            name: value for name, value in checkpoint["state_dict"].items() if "bias" not in name
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {**checkpoint["state_dict"], "layer.bias": torch.zeros(1)}


@pytest.mark.parametrize("average", [False, True])
def test_weights_that_a_hook_replaces_count(average: bool, tmp_path: Path) -> None:
    callbacks = [*([EMAWeightAveraging()] if average else []), ModelCheckpoint(tmp_path)]
    trainer = quiet(max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Halves(), loader(2))
    module = Halves()
    quiet().validate(module, loader(1), ckpt_path=tmp_path / "epoch=0-step=2")
    assert module.layer.bias.item() == 0.0
    assert module.layer.weight.abs().sum() > 0


@pytest.mark.parametrize("value", ["resnet18", {"name": "resnet", "depth": 18}], ids=["text", "dict"])
def test_a_value_under_the_name_of_the_weights_is_the_users(value: Any, tmp_path: Path) -> None:
    class Named(Toy):
        read: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["model"] = value

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.read = checkpoint["model"]

    module = Named()
    quiet(max_epochs=1, callbacks=ModelCheckpoint(tmp_path), enable_checkpointing=True).fit(module, loader(2))
    again = Named()
    quiet().validate(again, loader(1), ckpt_path=tmp_path / "epoch=0-step=2")
    assert again.read == value
    assert_same_bits(again.state_dict(), module.state_dict())


class KeepsKinds(Callback):
    """Adds values that are not in JSON, as packages do, and keeps them in its own state, too."""

    kept: dict[str, Any] = {
        "model_dtype": torch.bfloat16,
        "shape": torch.Size([2, 3]),
        "seen": {"a", "b", 3},
        "frozen": frozenset({torch.float16}),
        "device": torch.device("cuda:1"),
        "spent": timedelta(seconds=3.5),
        "file": Path("a/b"),
    }
    read: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.kept)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.read = {key: checkpoint[key] for key in self.kept}

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert alike(state_dict, {"state": self.kept})


def test_dtypes_sizes_sets_and_times_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    for epochs in (1, 2):
        callback = KeepsKinds()
        trainer = quiet(max_epochs=epochs, callbacks=[callback], **options)
        trainer.fit(Toy(), loader(4), ckpt_path="last")
    assert alike(callback.read, KeepsKinds.kept)
    path = str(next(iter(trainer.checkpoint_callbacks)).last_model_path)
    assert main(["checkpoint", "show", path]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "show", path, "--json"]) == 0
    added = json.loads(capsys.readouterr().out)["data"]["added"]
    assert {**added, "seen": sorted(map(str, added["seen"]))} == {
        "model_dtype": "bfloat16",
        "shape": [2, 3],
        "seen": ["3", "a", "b"],
        "frozen": ["float16"],
        "device": "cuda:1",
        "spent": 3.5,
        "file": "a/b",
    }
