"""Between two flushes a strategy sends what torch's own means send: the same collectives, of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.counted_collectives import CountCollectives, Counted
from tests.helpers.processes import once_per_module, run_distributed
from tests.helpers.strategy_models import GPT
from tests.helpers.strategy_runs import WAYS
from trainer import Callback, Trainer, TrainModule
from trainer.model.blocks import find_blocks
from trainer.strategies.deepspeed.engine import import_deepspeed

FIRST, LAST = 3, 6
"""Steps before and with the last that is counted; in the first ones the processes also agree on buffers that change."""
MICRO_BATCH = 4
Update = Callable[[Any], None]


class Counting(Callback):
    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == FIRST:
            self.mode = CountCollectives()
            self.mode.__enter__()
        elif trainer.global_step == LAST:
            self.mode.__exit__(None, None, None)


class BySamples(GPT):
    """Weights a micro-batch by its samples, which the loader knows."""

    num_items = TrainModule.num_items


def counted_by_trainer(way: str, kind: type[GPT]) -> tuple[Counted, Counted]:
    """Return what is sent, and the flags among them, one for each parameter and, for late gradients, each unit."""
    counting = Counting()
    torch.manual_seed(3)
    module = kind()
    trainer = WAYS[way].trainer(max_epochs=1, log_every_n_steps=100, callbacks=counting)
    trainer.fit(module, DataLoader(module.data(8 * MICRO_BATCH * 2), MICRO_BATCH))
    number = len([*module.parameters()]) + len(find_blocks(module)) + 1
    assert all(size == 4 * number for _, size in counting.mode.flags)
    return counting.mode.counted, counting.mode.flags


def counted_by_hand(way: str) -> Counted:
    torch.manual_seed(3)
    module = GPT()
    update, mode = BY_HAND[way](module), CountCollectives()
    for number, batch in enumerate(DataLoader(module.data(8 * MICRO_BATCH), MICRO_BATCH)):
        if number == FIRST:
            mode.__enter__()
        update(batch)
        if number == LAST - 1:
            mode.__exit__(None, None, None)
    return mode.counted


class Loss(nn.Module):
    """The loss as a forward, which torch's wrappers have to see."""

    def __init__(self, module: GPT) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> torch.Tensor:
        return self.module.loss(batch)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Update:
    def update(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    return update


def ddp(module: GPT) -> Update:
    model = nn.parallel.DistributedDataParallel(Loss(module), gradient_as_bucket_view=True)
    return step_of(model, module.optimizer())


def fsdp(module: GPT) -> Update:
    from torch.distributed.fsdp import fully_shard

    for block in find_blocks(module).values():
        fully_shard(block)
    model = fully_shard(Loss(module))
    return step_of(model, module.optimizer())


def zero_2(module: GPT) -> Update:
    deepspeed = import_deepspeed("cpu")
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=Loss(module), optimizer=module.optimizer(), config=config, dist_init_required=False
    )

    def update(batch: Any) -> None:
        engine.backward(engine(batch))
        engine.step()

    return update


BY_HAND = {"DDP x2": ddp, "FSDP x2": fsdp, "ZeRO-2 x2": zero_2}


def count_all() -> dict[str, tuple[Any, ...]]:
    """Return what this process sends: by the trainer, by it with losses weighted by items, and by hand."""
    kinds = (BySamples, GPT)
    return {way: (*(counted_by_trainer(way, kind) for kind in kinds), counted_by_hand(way)) for way in BY_HAND}


counts = once_per_module(lambda: run_distributed(count_all, 2))


@pytest.mark.parametrize("way", BY_HAND)
def test_as_many_collectives_of_as_many_bytes_as_by_torch(way: str, counts: list[dict[str, Any]]) -> None:
    for of_rank in counts:
        (ours, flags), (by_items, _), by_hand = of_rank[way]
        assert sum(by_hand.values()) >= LAST - FIRST
        assert ours == by_hand
        # Under fsdp processes may have gradients of different parameters.
        assert sum(flags.values()) == (LAST - FIRST if way == "FSDP x2" else 0)
        assert by_items - by_hand == {("all_reduce", 8): LAST - FIRST}  # the number of items of each step
