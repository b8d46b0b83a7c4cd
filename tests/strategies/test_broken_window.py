"""An error within a window leaves no gradients and no messages for the next run of the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.strategy_runs import WAYS, run_each
from tests.tiers import selected
from trainer import TrainModule, seed_everything

WIDTH, GLOBAL_BATCH = 6, 8
NAMES = ("single", "DDP x2", "FSDP x2", "FSDP 2x2", "PP x2", "PP 2 x FSDP 2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Stack(TrainModule):
    """With manual optimization the gradients are cleared after each step, as users do it too."""

    breaks = True

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - 1).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # In a step of a pipeline the other stages would wait for this one, and end with it. Together, because a process
        # is ended that has not left its step some seconds after another one has failed.
        if self.breaks and batch_idx == 1:
            if dist.is_initialized():
                dist.barrier()
            raise MemoryError("of the user")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = self.loss(batch[0])
        if self.automatic_optimization:
            return loss
        optimizer, is_last = self.optimizers(), batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(loss / 2)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(2 * GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(3)))


def train(name: str, manual: bool) -> list[dict[str, torch.Tensor]]:
    seed_everything(1)
    module, states = Stack(manual), []
    for breaks in (True, False):
        module.breaks = breaks
        settings = {} if manual else {"accumulate_grad_batches": 2}
        trainer = WAYS[name].trainer(seed=1, max_epochs=1, watchdog_seconds=100, **settings)
        try:
            trainer.fit(module, DataLoader(data(), WAYS[name].micro_batch))
        except MemoryError:
            assert breaks
        else:
            states.append(trainer.full_state_dict(everywhere=True))
    return states


def train_both(name: str) -> list[Any]:
    return [train(name, manual) for manual in ((False,) if "PP" in name else (False, True))]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        return run_each(train_both, selected(request, "name"))


@pytest.mark.parametrize("name", NAMES)
def test_the_next_run_begins_without_its_gradients(name: str, results: Any) -> None:
    seed_everything(1)
    module = Stack()
    optimizer = module.configure_optimizers()
    module.loss(data().tensors[0]).backward()
    optimizer.step()
    for rank in results[name]:
        for (state,) in rank:
            torch.testing.assert_close(state, {**module.state_dict()}, rtol=0, atol=1e-6)
