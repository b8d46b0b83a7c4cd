"""Processes that hold shards write one file with the full state, and continue from it, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.strategy_models import GPT
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer.callbacks import ModelCheckpoint

NAMES = ["DDP x2", "FSDP x2", "TP x2", "PP x2", "EP x2", "ZeRO-2 x2", "ZeRO-3 x2"]


def _train(name: str, ckpt_path: str | None, steps: int, *callbacks: Any) -> Any:
    way, module = WAYS[name], GPT(experts=2 if name == "EP x2" else 0)
    trainer = way.trainer(max_steps=steps, seed=3, callbacks=[*callbacks], enable_checkpointing=bool(callbacks))
    trainer.fit(module, DataLoader(module.data(40), way.micro_batch), ckpt_path=ckpt_path)
    return trainer


def save_and_continue(name: str, folder: str) -> Any:
    """Return the full weights after 3 steps, and after 2 more from the file alone, and from the folder."""
    place = f"{folder}/{name}"
    callback = ModelCheckpoint(place, "model", single_file=True)
    saved = _train(name, None, 3, callback)
    saved.save_checkpoint(f"{place}/alone.ckpt", single_file=True)
    weights = saved.full_state_dict(everywhere=True)
    again = _train(name, f"{place}/alone.ckpt", 5).full_state_dict(everywhere=True)
    return weights, again, _train(name, f"{place}/model", 5).full_state_dict(everywhere=True)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run_each(save_and_continue, selected(request, "name"), str(folder))


@pytest.mark.parametrize("name", NAMES)
def test_the_file_has_the_full_state_and_a_training_continues_from_it(name: str, results: Any) -> None:
    skip_if_missing(name)
    folder, weights = results[0] / name, results[1][name][0]
    for file in ("alone.ckpt", "model.ckpt"):
        read = torch.load(folder / file, weights_only=True)
        assert read["state_dict"].keys() == weights[0].keys()
        assert all(torch.equal(value, weights[0][key]) for key, value in read["state_dict"].items())
        (state,) = read["optimizer_states"]
        module = GPT(experts=2 if name == "EP x2" else 0)
        module.load_state_dict(read["state_dict"])
        optimizer = module.optimizer()
        optimizer.load_state_dict(state)
        assert all(optimizer.state[one]["exp_avg"].shape == one.shape for one in module.parameters())
    assert all(torch.equal(value, weights[2][key]) for key, value in weights[1].items())
    assert sorted(path.name for path in folder.iterdir()) == ["alone.ckpt", "last.json", "model", "model.ckpt"]


@pytest.mark.parametrize("name", NAMES)
def test_one_process_continues_from_the_file_of_two(name: str, results: Any, tmp_path: Path) -> None:
    skip_if_missing(name)
    module = GPT(experts=2 if name == "EP x2" else 0)
    trainer = WAYS[SINGLE].trainer(max_steps=5, seed=3)
    file = results[0] / name / "alone.ckpt"
    trainer.fit(module, DataLoader(module.data(40), WAYS[SINGLE].micro_batch), ckpt_path=file)
    for key, value in module.state_dict().items():
        assert torch.allclose(value, results[1][name][0][1][key], atol=1e-4), key
