"""Metrics, predictions, keys and checkpoints are the same under every strategy, also with uneven samples."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.helpers.compare import as_floats, assert_same_bits
from tests.helpers.portability import SaveAt
from tests.helpers.strategy_models import GPT, IGNORED
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer import TrainModule
from trainer.callbacks import PredictionWriter, read_predictions

LEFT_OUT = ("FSDP x2, communicating always", "CP x2, keys", "DDP x1", "ZeRO-1 x1", "ZeRO-2 x1")
COMPARED = [name for name in WAYS if " x " not in name and name not in LEFT_OUT]
SIZES = (33, 3)
"""Samples to evaluate: the last batches of two and of four processes are uneven, and some processes have none."""
STEPS = 4


def make_module() -> GPT:
    return GPT(ragged=True, tied=True, frozen=True, experts=4)


def work(name: str, folder: str) -> dict[str, Any]:
    """Train and save one way; then evaluate in new trainers the checkpoint of the run on one process, if it exists."""
    way, saving = WAYS[name], SaveAt(STEPS, f"{folder}/{name}")
    trainer = way.trainer(seed=3, max_steps=STEPS, max_epochs=1, accumulate_grad_batches=3, callbacks=saving)
    module = make_module()
    trainer.fit(module, DataLoader(module.data(81), way.micro_batch), DataLoader(module.data(46), way.micro_batch))
    found: dict[str, Any] = {
        "keys": list(module.state_dict()),
        "in fit": as_floats(trainer.callback_metrics),
        "full": trainer.full_state_dict(everywhere=True),
    }
    for size in SIZES:
        loader, fresh = DataLoader(module.data(size), way.micro_batch), make_module()
        (found["metrics", size],) = way.trainer().validate(fresh, loader, ckpt_path=f"{folder}/{SINGLE}")
        writer = PredictionWriter(f"{folder}/predictions {name} {size}")
        predictor = way.trainer(callbacks=writer)
        found["returned", size] = predictor.predict(fresh, loader, return_predictions=True)
        found["keys after", size] = list(fresh.state_dict())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def worked(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_each(work, dict.fromkeys((SINGLE, *selected(request, "name"))), str(folder))


def plain(folder: Path, name: str) -> GPT:
    """Load the module of a way's checkpoint, without a trainer."""
    module = GPT.load_from_checkpoint(folder / name)
    module.eval()
    return module


@torch.no_grad()
def metrics_by_hand(module: TrainModule, size: int) -> dict[str, float]:
    inputs, targets = module.data(size).tensors
    loss = cross_entropy(module(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return {"val_loss": loss.item(), "val_largest": float(inputs.max())}


WITH_SIZES = pytest.mark.parametrize("size", SIZES)
EACH_WAY = pytest.mark.parametrize("name", COMPARED)


@EACH_WAY
@WITH_SIZES
def test_validation_counts_every_token_once(name: str, size: int, worked: Any, folder: Path) -> None:
    skip_if_missing(name)
    expected = metrics_by_hand(plain(folder, SINGLE), size)
    assert math.isfinite(expected["val_loss"])
    for rank in worked[name]:
        assert rank["metrics", size] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@EACH_WAY
@WITH_SIZES
@torch.no_grad()
def test_predictions_are_there_once_and_in_order(name: str, size: int, worked: Any, folder: Path) -> None:
    skip_if_missing(name)
    module = plain(folder, SINGLE)
    expected = module(module.data(size).tensors[0])[:, -1]
    written = torch.stack(list(read_predictions(folder / f"predictions {name} {size}")))
    torch.testing.assert_close(written, expected, atol=1e-5, rtol=1e-5)
    # A global batch is split in the order of ranks.
    returned = [rank["returned", size] for rank in worked[name]]
    longest = max(map(len, returned))
    batches = chain.from_iterable([one[number] for one in returned if number < len(one)] for number in range(longest))
    assert_same_bits(torch.cat(list(batches)), written)


@EACH_WAY
def test_keys_are_those_of_the_plain_module(name: str, worked: Any) -> None:
    skip_if_missing(name)
    keys = list(make_module().state_dict())
    for rank in worked[name]:
        assert rank["keys"] == keys
        assert list(rank["full"]) == keys
        assert all(rank["keys after", size] == keys for size in SIZES)


@EACH_WAY
def test_a_checkpoint_is_read_without_a_trainer(name: str, worked: Any, folder: Path) -> None:
    skip_if_missing(name)
    module = plain(folder, name)
    assert_same_bits(dict(module.state_dict()), worked[name][0]["full"])
    assert module.net is not None
    assert module.net.head.weight is module.net.tokens.weight
    for key, value in plain(folder, SINGLE).state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, atol=1e-4, rtol=1e-4)
    assert not torch.equal(module.net.head.weight, make_module().net.head.weight)  # type: ignore[union-attr]


@EACH_WAY
def test_validation_in_fit_is_that_of_the_checkpoint(name: str, worked: Any, folder: Path) -> None:
    skip_if_missing(name)
    expected = metrics_by_hand(plain(folder, name), 46)
    for rank in worked[name]:
        assert {key: rank["in fit"][key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
