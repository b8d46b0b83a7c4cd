"""A module migrates a checkpoint of its former layout by torch's hooks of `load_state_dict`, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import quiet
from tests.tiers import selected
from trainer import TrainModule
from trainer.callbacks import EMAWeightAveraging

NAMES = ("single", "DDP x2", "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2")
WIDTH = 4


class Former(nn.Module):
    """Keeps its weight as (in, out), and names its bias otherwise."""

    def __init__(self, start: float) -> None:
        super().__init__()
        values = torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH) / 16
        self.weight, self.shift = nn.Parameter(values + start), nn.Parameter(torch.full((WIDTH,), start))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight * self.scale + self.shift


class _New(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight.t() * self.scale + self.bias


def _migrate(state: dict[str, Any], prefix: str) -> None:
    if f"{prefix}shift" in state:
        state[f"{prefix}bias"] = state.pop(f"{prefix}shift")
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t().contiguous()


class ByHook(_New):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: _migrate(state, prefix))


class ByOverride(_New):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _migrate(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Net(TrainModule):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([first, second]), nn.Linear(WIDTH, 1)
        self.loaded = 0
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(self, "loaded", self.loaded + 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = batch[0][:, :WIDTH]
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden).square().mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _test(name: str, path: str) -> tuple[float, int]:
    torch.manual_seed(2)
    module, way = Net(ByHook(), ByOverride()), WAYS[name]
    data = DataLoader(MLP.data(8), batch_size=way.micro_batch)
    (results,) = way.trainer().test(module, data, ckpt_path=path, verbose=False)
    return results["loss"], module.loaded


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[float, dict[str, list[Any]]]:
    torch.manual_seed(1)
    former, trainer = Net(Former(0.1), Former(-0.2)), WAYS["single"].trainer(max_epochs=1)
    data = DataLoader(MLP.data(8), batch_size=8)
    trainer.fit(former, data)
    path = str(tmp_path_factory.mktemp("former") / "former")
    trainer.save_checkpoint(path)
    (results,) = trainer.test(former, data, verbose=False)
    return results["loss"], run_each(_test, selected(request, "name"), path)


@pytest.mark.parametrize("name", NAMES)
def test_the_hooks_see_full_weights(name: str, found: Any) -> None:
    skip_if_missing(name)
    expected, ranks = found
    for loss, calls in ranks[name]:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert calls == 1


def test_averages_that_take_the_weights_place_pass_no_hook() -> None:
    torch.manual_seed(2)
    module = Net(ByHook(), ByOverride())
    module.validation_step = module.test_step  # type: ignore[method-assign, assignment]
    data = DataLoader(MLP.data(8), batch_size=8)
    quiet(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5)]).fit(module, data, data)
    assert module.loaded == 0
