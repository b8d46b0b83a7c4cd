"""Two processes against one hand-written torch loop over the same global batches: the same weights to 1e-6."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import mse_loss, softplus
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, as_floats, assert_same_bits
from tests.helpers.processes import once_per_module, run_distributed
from trainer import Callback, Trainer, TrainModule, seed_everything
from trainer.strategies import DDPStrategy

EPOCHS = 2
FEATURES = 6


@dataclass
class Shared:
    """A case that runs on two processes with micro-batches of 4, and on one with micro-batches of 8."""

    kind: str = "regressor"
    samples: int = 40
    accumulate: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    """Of DDPStrategy."""
    clip: float | None = None
    adam: bool = False
    scheduler: bool = False
    bound: float = 1e-6


def counting_hook(calls, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """Count the calls of DDP's own reduction."""
    calls.append(bucket.index())
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


SHARED = {
    "plain": Shared(),
    "adamw, clipped, scheduled": Shared(adam=True, clip=0.1, scheduler=True),
    "a short batch of 5": Shared(samples=37),
    "a short batch of 1, so one padding batch": Shared(samples=33),
    "window of 3, the last of 2": Shared(accumulate=3),
    "window of 3, the last of 1": Shared(accumulate=3, samples=32),
    "window of 3, short batch": Shared(accumulate=3, samples=37),
    "window of 3, padding": Shared(accumulate=3, samples=33),
    "window of 2, the last a padding batch alone": Shared(accumulate=2, samples=33),
    "tokens": Shared("tokens"),
    "tokens, window of 3, short batch": Shared("tokens", accumulate=3, samples=37),
    "tokens, padding": Shared("tokens", samples=33),
    "tokens, window of 3, padding": Shared("tokens", accumulate=3, samples=33),
    "static graph": Shared(accumulate=3, samples=37, options=(("static_graph", True),)),
    "unused parameters": Shared("unused", accumulate=3, samples=37, options=(("find_unused_parameters", True),)),
    "no bucket view": Shared(accumulate=3, samples=37, options=(("gradient_as_bucket_view", False),)),
    "fp16_compress": Shared(samples=37, options=(("comm_hook", "fp16_compress"),), bound=2e-3),
    "counted": Shared(accumulate=3, options=(("comm_hook", counting_hook), ("comm_hook_state", []))),
    "gan": Shared("gan"),
    "gan, a short batch of 5": Shared("gan", samples=37),
    "gan, a short batch of 1, so one padding batch": Shared("gan", samples=33),
    "gan, accumulated by hand": Shared("gan accumulated"),
}


def cosine(optimizer: Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=8)


class Regressor(TrainModule):
    """A module whose loss is a mean over the samples."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.layers(batch[0])[:, 0], batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        items = self.num_items(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=items)
        self.log("largest", batch[0].max(), on_epoch=True, on_step=False, reduce_fx="max")
        return loss

    def optimizer(self) -> Optimizer:
        if self.shared.adam:
            # A large eps: Adam divides by the root of tiny gradients, which magnifies mere rounding.
            return AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        return SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        if not self.shared.scheduler:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine(optimizer), "interval": "step"}}


class Tokens(Regressor):
    """A module whose loss is a mean over tokens: sample i has i % 5 + 1, so their number differs between processes."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, length = batch
        errors = (self.layers(x)[:, :1] - y[:, None]) * torch.linspace(0.5, 2.0, 5)
        counted = torch.arange(5) < length[:, None]
        return (errors.pow(2) * counted).sum() / counted.sum()

    def num_items(self, batch: Any) -> int:
        return int(batch[2].sum())


class Unused(Regressor):
    """A module with a branch that only every second batch of one process uses, and one that is never used."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.branch = nn.Linear(FEATURES, 1)
        self.never = nn.Linear(FEATURES, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        predicted = self.layers(x)[:, 0]
        wanted = x[:, 0] > 1.0
        if wanted.any():
            predicted = predicted + self.branch(x)[:, 0] * wanted
        return mse_loss(predicted, y)


class Gan(TrainModule):
    """Manual optimization with two optimizers; the noise is part of the data, so that it can be split."""

    automatic_optimization = False

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.accumulate = 2 if shared.kind == "gan accumulated" else 1
        self.generator = nn.Sequential(nn.Linear(FEATURES - 2, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def losses(self, batch: Any) -> Iterator[torch.Tensor]:
        """Return the losses of the discriminator and of the generator."""
        noise, real = batch[0][:, 2:], batch[0][:, :2]
        yield (
            softplus(-self.discriminator(real)).mean()
            + softplus(self.discriminator(self.generator(noise).detach())).mean()
        ) / self.accumulate
        yield softplus(-self.discriminator(self.generator(noise))).mean() / self.accumulate

    def training_step(self, batch: Any, batch_idx: int) -> None:
        last = (batch_idx + 1) % self.accumulate == 0
        for optimizer, loss in zip(self.optimizers(), self.losses(batch), strict=True):
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(loss)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [SGD(self.discriminator.parameters(), lr=0.1), AdamW(self.generator.parameters(), lr=1e-2, eps=1e-3)]


KINDS: dict[str, type[TrainModule]] = {
    "regressor": Regressor,
    "tokens": Tokens,
    "unused": Unused,
    "gan": Gan,
    "gan accumulated": Gan,
}


def shared_data(shared: Shared) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shared.samples, FEATURES, generator=generator)
    tensors = [x, x.sum(1).sin()]
    if shared.kind == "tokens":
        tensors.append(torch.arange(shared.samples) % 5 + 1)
    return TensorDataset(*tensors)


def make_shared(shared: Shared) -> Any:
    seed_everything(3)
    return KINDS[shared.kind](shared)


class CountSchedulerSteps(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.scheduler_configs:
            self.steps = trainer.scheduler_configs[0].scheduler.last_epoch


def train_all_on_this_process() -> dict[str, Any]:
    """Train every case of SHARED, one after the other, as one of two processes."""
    ended = {}
    for name, shared in SHARED.items():
        module = make_shared(shared)
        counter = CountSchedulerSteps()
        trainer = Trainer(
            strategy=DDPStrategy(**dict(shared.options)),
            devices=2,
            max_epochs=EPOCHS,
            accumulate_grad_batches=shared.accumulate,
            gradient_clip_val=shared.clip,
            callbacks=counter,
            **QUIET,
        )
        trainer.fit(module, DataLoader(shared_data(shared), 4))
        ended[name] = {
            "weights": module.state_dict(),
            "steps": trainer.global_step,
            "scheduler steps": counter.steps,
            "samples": trainer.progress.samples,
            "logged": as_floats(trainer.callback_metrics),
            "reductions": len(dict(shared.options).get("comm_hook_state", [])),
        }
    return ended


on_two = once_per_module(lambda: run_distributed(train_all_on_this_process, 2))


def shared_by_hand(module: Any, shared: Shared) -> int:
    """Train on one process, with each window as one big batch; return the number of steps."""
    data = shared_data(shared)
    optimizer = module.optimizer()
    scheduler = cosine(optimizer) if shared.scheduler else None
    steps = 0
    for _ in range(EPOCHS):
        for window in DataLoader(data, 8 * shared.accumulate):
            optimizer.zero_grad()
            module.loss(window).backward()
            if shared.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), shared.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            steps += 1
    return steps


def gan_by_hand(module: Gan, shared: Shared) -> int:
    optimizers = module.configure_optimizers()
    networks = [module.discriminator, module.generator]
    batches = list(enumerate(DataLoader(shared_data(shared), 8), 1)) * EPOCHS
    for number, batch in batches:
        for optimizer, network, loss in zip(optimizers, networks, module.losses(batch), strict=True):
            parameters = list(network.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if number % module.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return len(batches)


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_train_as_one_big_batch(name: str, on_two: list[dict[str, Any]]) -> None:
    shared = SHARED[name]
    expected = make_shared(shared)
    start = {key: value.clone() for key, value in expected.state_dict().items()}
    steps = (gan_by_hand if shared.kind.startswith("gan") else shared_by_hand)(expected, shared)
    ours, other = (rank[name] for rank in on_two)
    assert_same_bits(ours, other, "rank 1")
    assert ours["steps"] == steps
    assert ours["samples"] == EPOCHS * shared.samples
    assert ours["scheduler steps"] == (steps if shared.scheduler else 0)
    difference = 0.0
    for key, value in expected.state_dict().items():
        difference = max(difference, (value - ours["weights"][key]).abs().max().item())
        assert key.startswith("never.") or not torch.allclose(value, start[key], atol=1e-4), f"{key} was not trained"
    assert difference <= shared.bound


@pytest.mark.parametrize("name", [name for name, shared in SHARED.items() if not shared.kind.startswith("gan")])
def test_two_processes_log_what_one_logs(name: str, on_two: list[dict[str, Any]]) -> None:
    shared = SHARED[name]
    trainer = Trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=shared.accumulate, gradient_clip_val=shared.clip, **QUIET
    )
    trainer.fit(make_shared(shared), DataLoader(shared_data(shared), 8))
    assert {"loss_step", "loss_epoch", "largest"} <= trainer.callback_metrics.keys()
    for rank in on_two:
        assert rank[name]["logged"] == pytest.approx(as_floats(trainer.callback_metrics), rel=max(shared.bound, 2e-6))


def test_the_comm_hook_was_used(on_two: list[dict[str, Any]]) -> None:
    compressed, plain = (on_two[0][name]["weights"] for name in ("fp16_compress", "a short batch of 5"))
    assert any(not torch.equal(compressed[key], plain[key]) for key in plain)


def test_gradients_travel_once_a_step_however_long_the_window(on_two: list[dict[str, Any]]) -> None:
    for rank in on_two:
        assert rank["counted"]["reductions"] == rank["counted"]["steps"] == EPOCHS * 2
