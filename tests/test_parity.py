"""The trainer against hand-written torch loops: the same bits on one device, the same numbers on two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import run_distributed
from trainer import Callback, Trainer, TrainModule, seed_everything
from trainer.strategies import DDPStrategy

EPOCHS = 2
FEATURES, CLASSES = 6, 3
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 2,
}

# -- one device --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One way to train, understood by the hand-written loop and by the module below."""

    optimizers: Callable[[nn.Module], list[Optimizer]]
    samples: int = 40
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: str = "norm"
    scheduler: Callable[[Optimizer], Any] | None = None
    interval: str = "epoch"
    precision: str = "32-true"
    dropout: float = 0.0


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2)]


def one_for_each_half(model: Any) -> list[Optimizer]:
    return [SGD(model.body.parameters(), lr=0.1, momentum=0.9), AdamW(model.head.parameters(), lr=1e-2)]


def every_step(optimizer: Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=8)


def every_epoch(optimizer: Optimizer) -> Any:
    return ExponentialLR(optimizer, gamma=0.5)


def on_plateau(optimizer: Optimizer) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0, threshold_mode="abs")


CASES = {
    "sgd": Case(sgd),
    "sgd, short batch": Case(sgd, samples=38),
    "sgd, window of 3": Case(sgd, accumulate=3),
    "sgd, window of 3, short batch": Case(sgd, accumulate=3, samples=30),
    "adamw": Case(adamw),
    "adamw, window of 3": Case(adamw, accumulate=3),
    "adamw, window of 3, short batch": Case(adamw, accumulate=3, samples=30),
    "clipped by norm": Case(sgd, clip=0.05, accumulate=3),
    "clipped by value": Case(sgd, clip=0.01, clip_algorithm="value"),
    "scheduler by step": Case(sgd, scheduler=every_step, interval="step", accumulate=3, samples=30),
    "scheduler by epoch": Case(adamw, scheduler=every_epoch),
    "scheduler on plateau": Case(sgd, scheduler=on_plateau, samples=30),
    "bf16-mixed": Case(adamw, precision="bf16-mixed", accumulate=3, clip=0.05),
    "16-mixed": Case(sgd, precision="16-mixed", samples=10, accumulate=2, clip=0.05),
    "64-true": Case(adamw, precision="64-true", accumulate=3, samples=30),
    "bf16-true": Case(sgd, precision="bf16-true", accumulate=3),
    "dropout": Case(adamw, dropout=0.5, accumulate=3),
    "two optimizers": Case(one_for_each_half, accumulate=3, clip=0.05),
}
DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Classifier(TrainModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(case.dropout))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizers = self.case.optimizers(self)
        if self.case.scheduler is None:
            return optimizers
        scheduler = {
            "scheduler": self.case.scheduler(optimizers[0]),
            "interval": self.case.interval,
            "monitor": "val_loss",
        }
        return {"optimizer": optimizers[0], "lr_scheduler": scheduler}


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator))


def train_by_hand(model: Classifier, case: Case) -> tuple[list[Optimizer], Any]:
    """What a careful user would write, with nothing of ours."""
    model.to(dtype := DTYPES.get(case.precision, torch.float32))
    # A generator of its own: torch's DataLoader draws from the global one otherwise, and ours does not.
    loader = DataLoader(make_data(case.samples), 4, generator=torch.Generator())
    batches = [(x.to(dtype), y) for x, y in loader]
    optimizers = case.optimizers(model)
    parameters = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    scheduler = case.scheduler(optimizers[0]) if case.scheduler else None
    half = AUTOCAST.get(case.precision)
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "16-mixed")
    for _ in range(EPOCHS):
        for first in range(0, len(batches), case.accumulate):
            window = batches[first : first + case.accumulate]
            samples = sum(len(x) for x, _ in window)
            equal = all(len(x) == len(window[0][0]) for x, _ in window)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for x, y in window:
                with torch.autocast("cpu", half) if half else nullcontext():
                    loss = cross_entropy(model(x), y)
                loss = loss / len(window) if equal else loss / (samples / len(x))
                scaler.scale(loss).backward()
            for optimizer, own in zip(optimizers, parameters, strict=True):
                scaler.unscale_(optimizer)
                if case.clip is not None and case.clip_algorithm == "norm":
                    nn.utils.clip_grad_norm_(own, case.clip)
                elif case.clip is not None:
                    nn.utils.clip_grad_value_(own, case.clip)
                scaler.step(optimizer)
            scaler.update()
            if scheduler is not None and case.interval == "step":
                scheduler.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(validation_loss(model, batches))
        elif scheduler is not None and case.interval == "epoch":
            scheduler.step()
    return optimizers, scheduler


def validation_loss(model: nn.Module, batches: list[Any]) -> float:
    model.eval()
    with torch.no_grad():
        total = sum(cross_entropy(model(x), y).item() * len(x) for x, y in batches)
    model.train()
    return total / sum(len(x) for x, _ in batches)


def assert_same_bits(ours: Any, theirs: Any, where: str = "") -> None:
    """Nested containers of tensors and numbers, compared to the last bit."""
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), f"{where}: differs by up to {(ours - theirs).abs().max().item()}"
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same_bits(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("name", CASES)
def test_one_device_has_the_same_bits_as_a_hand_written_loop(name: str) -> None:
    case = CASES[name]
    seed_everything(7)
    expected = Classifier(case)
    start = {key: value.clone() for key, value in expected.state_dict().items()}
    expected_optimizers, expected_scheduler = train_by_hand(expected, case)

    trainer = Trainer(
        seed=7,
        max_epochs=EPOCHS,
        precision=case.precision,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm=case.clip_algorithm,
        **QUIET,
    )
    module = Classifier(case)
    data = make_data(case.samples)
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 4))

    assert_same_bits(module.state_dict(), expected.state_dict())
    assert not torch.equal(module.head.weight, start["head.weight"].to(module.head.weight.dtype))
    ours, theirs = ([o.state_dict() for o in optimizers] for optimizers in (trainer.optimizers, expected_optimizers))
    assert any(group["state"] for group in theirs)
    assert_same_bits(ours, theirs)
    if expected_scheduler is not None:
        assert_same_bits(trainer.scheduler_configs[0].scheduler.state_dict(), expected_scheduler.state_dict())
        assert ours[0]["param_groups"][0]["lr"] != sgd(module)[0].param_groups[0]["lr"]


def test_every_case_is_a_different_training() -> None:
    """Otherwise what it switches on would not be tested."""
    ends = set()
    for case in CASES.values():
        seed_everything(7)
        model = Classifier(case)
        train_by_hand(model, case)
        ends.add(tuple(model.head.weight.double().flatten().tolist()))
    assert len(ends) == len(CASES)


@pytest.mark.parametrize(("accumulate", "line_search"), [(1, "strong_wolfe"), (3, None)])
def test_lbfgs_has_the_same_bits_as_a_hand_written_loop(accumulate: int, line_search: str | None) -> None:
    def optimizer_of(model: nn.Module) -> list[Optimizer]:
        return [LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=line_search)]

    case = Case(optimizer_of, accumulate=accumulate, clip=0.5)
    seed_everything(7)
    expected = Classifier(case)
    batches = list(DataLoader(make_data(case.samples), 4))
    optimizer = optimizer_of(expected)[0]
    for first in list(range(0, len(batches), accumulate)) * EPOCHS:
        window = batches[first : first + accumulate]

        def closure(window: list[Any] = window) -> torch.Tensor:
            optimizer.zero_grad()
            losses = []
            for x, y in window:
                losses.append(cross_entropy(expected(x), y) / len(window))
                losses[-1].backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            return torch.stack(losses).sum()

        optimizer.step(closure)

    trainer = Trainer(seed=7, max_epochs=EPOCHS, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, **QUIET)
    module = Classifier(case)
    trainer.fit(module, DataLoader(make_data(case.samples), 4))
    assert_same_bits(module.state_dict(), expected.state_dict())
    assert_same_bits(trainer.optimizers[0].state_dict(), optimizer.state_dict())
    assert trainer.global_step == EPOCHS * -(-10 // accumulate)


def test_everything_switched_on_changes_no_bit(tmp_path: Path) -> None:
    """Progress bar, summary, loggers and checkpoints only look on."""
    case = CASES["dropout"]
    seed_everything(7)
    expected = Classifier(case)
    train_by_hand(expected, case)
    trainer = Trainer(
        seed=7, max_epochs=EPOCHS, accumulate_grad_batches=3, default_root_dir=tmp_path, log_every_n_steps=1
    )
    module = Classifier(case)
    data = make_data(case.samples)
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 4))
    assert_same_bits(module.state_dict(), expected.state_dict())


# -- two processes -----------------------------------------------------------------------------------------------------


@dataclass
class Shared:
    """A run on two processes with micro-batches of 4, and on one with micro-batches of 8."""

    kind: str = "regressor"
    samples: int = 40
    accumulate: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    """Of DDPStrategy."""
    clip: float | None = None
    adam: bool = False
    scheduler: bool = False
    bound: float = 1e-6


SHARED = {
    "plain": Shared(),
    "adamw, clipped, scheduled": Shared(adam=True, clip=0.1, scheduler=True),
    "a short batch of 5": Shared(samples=37),
    "a short batch of 1, so one filler": Shared(samples=33),
    "window of 3, the last of 2": Shared(accumulate=3),
    "window of 3, the last of 1": Shared(accumulate=3, samples=32),
    "window of 3, short batch": Shared(accumulate=3, samples=37),
    "window of 3, filler": Shared(accumulate=3, samples=33),
    "window of 2, the last a filler alone": Shared(accumulate=2, samples=33),
    "tokens": Shared("tokens"),
    "tokens, window of 3, short batch": Shared("tokens", accumulate=3, samples=37),
    "tokens, filler": Shared("tokens", samples=33),
    "tokens, window of 3, filler": Shared("tokens", accumulate=3, samples=33),
    "static graph": Shared(accumulate=3, samples=37, options=(("static_graph", True),)),
    "unused parameters": Shared("unused", accumulate=3, samples=37, options=(("find_unused_parameters", True),)),
    "no bucket view": Shared(accumulate=3, samples=37, options=(("gradient_as_bucket_view", False),)),
    "fp16_compress": Shared(samples=37, options=(("comm_hook", "fp16_compress"),), bound=2e-3),
    "gan": Shared("gan"),
    "gan, accumulated by hand": Shared("gan accumulated"),
}


class Regressor(TrainModule):
    """A loss that is a mean over the samples."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.layers(batch[0])[:, 0], batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def optimizer(self) -> Optimizer:
        if self.shared.adam:
            # A large eps: Adam divides by the root of tiny gradients, which magnifies mere rounding.
            return AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        return SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        if not self.shared.scheduler:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": every_step(optimizer), "interval": "step"}}


class Tokens(Regressor):
    """Sample i has i % 5 + 1 tokens: the loss is a mean over tokens, and their number differs between processes."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, length = batch
        errors = (self.layers(x)[:, :1] - y[:, None]) * torch.linspace(0.5, 2.0, 5)
        counted = torch.arange(5) < length[:, None]
        return (errors.pow(2) * counted).sum() / counted.sum()

    def num_items(self, batch: Any) -> int:
        return int(batch[2].sum())


class Unused(Regressor):
    """A branch is used by the samples of every second batch of one process only; another one never."""

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
    """Manual optimization with two optimizers; the noise comes with the data, so that it can be split."""

    automatic_optimization = False

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.accumulate = 2 if shared.kind == "gan accumulated" else 1
        self.generator = nn.Sequential(nn.Linear(FEATURES - 2, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def losses(self, batch: Any) -> Iterator[torch.Tensor]:
        """The discriminator's loss, then the generator's."""
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
    """Every case of SHARED, one after the other, as one of two processes."""
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
        }
    return ended


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("two"))
        return run_distributed(train_all_on_this_process, 2)


def shared_by_hand(module: Any, shared: Shared) -> int:
    """One process, and each window as one big batch; returns the number of steps."""
    data = shared_data(shared)
    optimizer = module.optimizer()
    scheduler = every_step(optimizer) if shared.scheduler else None
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


def test_the_comm_hook_was_used(on_two: list[dict[str, Any]]) -> None:
    compressed, plain = (on_two[0][name]["weights"] for name in ("fp16_compress", "a short batch of 5"))
    assert any(not torch.equal(compressed[key], plain[key]) for key in plain)
