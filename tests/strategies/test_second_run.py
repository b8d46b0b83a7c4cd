"""A second run of a module that fsdp has sharded computes in its own precision, and says which options it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.processes import once_per_module, run_distributed
from tests.strategies.test_steps_by_hand import BLOCKS, build, loader, trainer_of
from trainer import Trainer, TrainModule, seed_everything
from trainer.errors import ConfigError
from trainer.strategies import FSDPStrategy

WIDTH, GLOBAL_BATCH = 6, 8
RUNS = (("fit", "bf16-mixed"), ("test", "32-true"), ("fit", "32-true"), ("test", "bf16-mixed"))
ORDERS = {
    "mixed first": (nn.BatchNorm1d, RUNS),
    "full first": (nn.BatchNorm1d, (*RUNS[2:], *RUNS[:2])),
    "low last": (nn.LayerNorm, (RUNS[0], ("test", "bf16-true"))),
}


class Block(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), norm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


class Stack(TrainModule):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(norm) for _ in range(2)), nn.Linear(WIDTH, 1)
        self.blocks[1].requires_grad_(False)
        self.dtypes: list[tuple[torch.dtype, ...]] = []
        self.blocks[0].layer.register_forward_hook(self.note)

    def note(self, layer: Any, *_: Any) -> None:
        self.dtypes.append((layer.weight.dtype, self.blocks[0].norm.weight.dtype))  # type: ignore[union-attr]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x).float() - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch[0]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[1].requires_grad_(batch_idx > 0)  # frozen when its dtypes are first chosen

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(4 * GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(3)))


def run(order: str) -> list[Any]:
    seed_everything(1)
    norm, runs = ORDERS[order]
    module, found = Stack(norm), []
    for number, (stage, precision) in enumerate(runs):
        options: dict[str, Any] = (
            {"sharding_strategy": "SHARD_GRAD_OP"} if number % 2 else {"auto_wrap_policy": "Block"}
        )
        strategy = FSDPStrategy(**options)
        settings = {"precision": precision, "max_epochs": 1, "seed": 1, "watchdog_seconds": 100, **QUIET}
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, **settings)
        module.dtypes.clear()
        if stage == "fit":
            trainer.fit(module, DataLoader(data(), GLOBAL_BATCH // 2))
        else:
            trainer.test(module, DataLoader(data(), GLOBAL_BATCH // 2), verbose=False)
        state = trainer.full_state_dict(everywhere=True)
        logged = float(trainer.callback_metrics["loss"]) if stage == "test" else 0.0
        found.append((set(module.dtypes), logged, state, str(strategy)))
    if norm is nn.BatchNorm1d:
        low = Trainer(accelerator="cpu", devices=2, strategy="fsdp", precision="bf16-true", **QUIET)
        with pytest.raises(ConfigError, match="'bf16-true' keeps the norms of Stack in float32"):
            low.test(module, DataLoader(data(), GLOBAL_BATCH // 2), verbose=False)
    return found


def run_both() -> dict[str, list[Any]]:
    return {order: run(order) for order in ORDERS}


results = once_per_module(lambda: run_distributed(run_both, 2))


@pytest.mark.parametrize("order", ORDERS)
def test_each_run_has_its_own_precision(order: str, results: Any) -> None:
    norm, runs = ORDERS[order]
    for rank in results:
        for number, ((stage, precision), (dtypes, logged, state, described)) in enumerate(
            zip(runs, rank[order], strict=True)
        ):
            low = torch.bfloat16 if precision != "32-true" else torch.float32
            assert dtypes == {(low, torch.float32 if norm is nn.BatchNorm1d else low)}
            assert ("SHARD_GRAD_OP" in described) == bool(number % 2)
            if stage == "test":
                module = Stack(norm)
                module.load_state_dict(state)
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low is not torch.float32):
                    expected = float(module.eval().loss(data().tensors[0]))
                assert logged == pytest.approx(expected, abs=1e-5 if precision == "32-true" else 5e-2)


def fit_twice() -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    found = {}
    for name in ("Queue", "HalfFrozen"):
        for way in ("DDP x2", BLOCKS):
            module = build(name)
            for _ in range(2):
                trainer = trainer_of((name, way, "32-true"))
                trainer.fit(module, loader((name, way, "32-true")))
            found[name, way] = trainer.full_state_dict(everywhere=True)
    return found


twice = once_per_module(lambda: run_distributed(fit_twice, 2, timeout=90.0))


@pytest.mark.parametrize("name", ["Queue", "HalfFrozen"])
def test_a_second_fit_begins_with_the_buffers_of_rank_0_and_any_frozen_dtype(name: str, twice: Any) -> None:
    for of_rank in twice:
        expected = twice[0][name, "DDP x2"]
        for key, value in of_rank[name, BLOCKS].items():
            if key != "queue":  # each process has its own after its last step
                torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-7)
