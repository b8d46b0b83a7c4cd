"""What the precisions cast and what keeps its digits, in modules as users write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer import Trainer, TrainModule
from trainer.precision import PRECISIONS

NAMES = ("single", "DDP x2", "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2")
LOW = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def batches(number: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(number * 4, 4, generator=torch.Generator().manual_seed(2))), 4)


class Tables(TrainModule):
    """Tables, counters, statistics, complex numbers and metrics. `late`: they are built in `configure_model`."""

    def __init__(self, late: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.late, self.norm = late, norm
        self.total = torchmetrics.SumMetric()
        self.nested = nn.ModuleDict({"all": torchmetrics.MetricCollection([torchmetrics.MeanMetric()])})
        if not late:
            self.build()

    def configure_model(self) -> None:
        if self.late and not hasattr(self, "layers"):
            self.build()

    def build(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if self.norm else nn.LayerNorm(8))
        self.out = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 1))
        angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.1])
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8) / 8), persistent=False)
        self.register_buffer("places", torch.linspace(-1, 1, 8))
        self.register_buffer("count", torch.tensor(256.0))  # where bfloat16 stops to count
        self.register_buffer("counts", torch.full((3,), 256.0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.count += 1
        self.counts += 1
        # The sum with the table is float32, and the next layer has to take it.
        return self.out(self.layers(batch[0]) + self.places).float().square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for metric in (self.total, self.nested["all"]["MeanMetric"]):
            metric.update(torch.tensor([257.0, 1.0], device=self.device, dtype=torch.float32))
        self.log("total", self.total)
        self.log_dict(self.nested["all"])

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


KEPT = ("rotations", "frequencies", "places", "count", "counts")


def trained(name: str, precision: str, late: bool = False) -> Any:
    # DeepSpeed has no BatchNorm with 16-bit weights on a CPU.
    module = Tables(late, norm="ZeRO" not in name)
    trainer = WAYS[name].trainer(precision=precision, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, batches(3 * WAYS[name].processes), batches(4))
    validated = {key: float(value) for key, value in trainer.callback_metrics.items()}
    tested = [] if "ZeRO-3" in name else trainer.test(module, batches(4), verbose=False)
    statistics = [tensor.dtype for tensor in module.layers[1].state_dict().values() if tensor.is_floating_point()]
    weights = {p.dtype for p in module.layers[0].parameters()}
    return {key: getattr(module, key).clone() for key in KEPT}, validated, tested, statistics, weights


def in_bfloat16(name: str) -> Any:
    return trained(name, "bf16-true")


@pytest.fixture(scope="module")
def by_strategy(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_each(in_bfloat16, selected(request, "name"))


def assert_kept(kept: dict[str, torch.Tensor], validated: Any, tested: Any) -> None:
    built = Tables()
    for key in KEPT:
        expected = getattr(built, key) + (3 if key.startswith("count") else 0)
        # Built under the default dtype float64 they have more digits than built in float32.
        torch.testing.assert_close(kept[key].to(expected.dtype), expected, rtol=1e-6, atol=1e-6)
    for metrics in (validated, *tested):
        assert metrics["MeanMetric"] == 129
        assert metrics["total"] % 258 == 0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_weights_loses_digits_under_any_strategy(name: str, by_strategy: Any) -> None:
    skip_if_missing(name)
    for kept, validated, tested, statistics, weights in by_strategy[name]:
        assert_kept(kept, validated, tested)
        if "ZeRO" not in name:
            assert {*statistics} == {torch.float32}
            assert weights == {torch.bfloat16}


@pytest.mark.parametrize("late", [False, True], ids=["in __init__", "in configure_model"])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_nothing_but_weights_loses_digits(precision: str, late: bool) -> None:
    kept, validated, tested, statistics, weights = trained("single", precision, late)
    assert_kept(kept, validated, tested)
    assert {*statistics} == {torch.float64 if precision == "64-true" else torch.float32}
    assert weights == {LOW.get(precision, torch.float64)}


class Adapted(TrainModule):
    """A 16-bit base with a float32 adapter, and a norm with digits. `late`: what `configure_model` builds."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self.late = late
        self.build("all of it" if not late else "base" if late == "adapter" else "")

    def configure_model(self) -> None:
        self.build(self.late)

    def build(self, what: str) -> None:
        torch.manual_seed(0)
        if what in ("base", "all of it"):
            self.base = nn.Linear(4, 4).bfloat16().requires_grad_(False)
        if what in ("adapter", "all of it"):
            self.adapter, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.norm.load_state_dict({**self.norm.state_dict(), "weight": torch.full((4,), 1.001)})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.norm(self.base(batch[0]) + self.adapter(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("late", ["adapter", "all of it"])
def test_layers_of_configure_model_are_cast_as_those_of_init_are(late: str) -> None:
    states = []
    for module in (Adapted(""), Adapted(late)):
        torch.manual_seed(0)
        Trainer(precision="bf16-true", max_steps=1, accelerator="cpu", **QUIET).fit(module, batches(1))
        states.append(module.state_dict())
    assert states[0]["adapter.weight"].dtype is torch.float32
    assert {name: value.dtype for name, value in states[1].items()} == {n: v.dtype for n, v in states[0].items()}
    if late == "all of it":
        assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())
    assert float(states[1]["norm.weight"][0]) != float(states[1]["norm.weight"].bfloat16()[0])


class Mixture(TrainModule):
    """A 16-bit base with float32 layers: an adapter that casts by itself, a norm, and a head that does not."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)).to(low)
        self.adapter, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.7]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.base(batch[0])
        hidden = self.norm(hidden + self.adapter(hidden.float()).to(hidden.dtype))
        logits = self.head(self.base[1](hidden))
        return self.criterion(logits, torch.ones_like(logits)) + self.criterion(logits.float(), logits.detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@pytest.mark.parametrize("precision", LOW)
def test_float32_layers_of_a_16_bit_module_stay_float32_and_train(precision: str) -> None:
    module = Mixture(LOW[precision])
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for _ in range(2):  # a second run finds what the first has made
        Trainer(precision=precision, max_steps=4, accelerator="cpu", **QUIET).fit(module, batches(4))
    for name, parameter in module.named_parameters():
        assert parameter.dtype is before[name].dtype, name
        moved = (parameter != before[name]).float().mean()
        assert moved == 1 or parameter.dtype is not torch.float32, name


def test_a_float32_layer_beside_trained_16_bit_ones_is_sharded_too() -> None:
    module = Mixture(torch.bfloat16)
    WAYS["FSDP x1"].trainer(precision="bf16-true", max_steps=2).fit(module, batches(4))
    assert module.adapter.weight.dtype is torch.float32
    assert module.base[0].weight.dtype is torch.bfloat16


def test_a_checkpoint_with_16_bit_buffers_is_read_into_float32_ones() -> None:
    module = Tables()
    PRECISIONS["bf16-true"].convert_module(module)
    saved = {name: tensor.bfloat16() for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    module.load_state_dict(saved, strict=False)
    assert module.places.dtype is module.layers[1].running_var.dtype is torch.float32


def test_a_table_that_meets_16_bit_numbers_outside_of_layers_is_explained() -> None:
    class Queue(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("queue", torch.randn(4, 9))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (self.layer(batch[0]) @ self.queue).float().square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters())

    with pytest.raises(Exception, match=r"self\.table\.to\(x\.dtype\)"):
        Trainer(precision="bf16-true", max_steps=1, accelerator="cpu", **QUIET).fit(Queue(), batches(2))


class Shampoo(torch.optim.SGD):
    """Has a matrix product, and a count that it makes in its first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (one for group in self.param_groups for one in group["params"]):
            self.state[p].setdefault("count", torch.zeros(()))
            self.state[p]["count"] += 1
            update = p.grad @ (p.grad.T @ p.grad) if p.dim() == 2 else p.grad
            p.sub_(update, alpha=0.05)


class Partly(TrainModule):
    """A module with a part in float32, trained by hand or not."""

    def __init__(self, manual: bool, closure: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self.closure = not manual, closure
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 8)
        self.inside: set[Any] = set()

    def loss(self, batch: Any) -> torch.Tensor:
        self.inside.add(("forward", torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
        hidden = self.body(batch[0])
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.head(hidden.float()).square().mean()
        return self.head(hidden).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()
        if self.closure:
            optimizer.step(lambda: self.by_hand(batch, optimizer))
            return None
        self.by_hand(batch, optimizer)
        return optimizer.step()

    def by_hand(self, batch: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        return loss

    def on_after_backward(self) -> None:
        self.inside.add(("hook", torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))

    on_before_optimizer_step = lambda self, optimizer: self.on_after_backward()  # noqa: E731

    def configure_optimizers(self) -> Any:
        return (torch.optim.SGD if self.closure else Shampoo)(self.parameters(), lr=0.05)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_backward_and_steps_by_hand_are_outside_of_the_forwards_precision(precision: str) -> None:
    found = []
    for manual, closure in ((False, False), (True, False), (True, True)):
        module = Partly(manual, closure)
        trainer = Trainer(accelerator="cpu", precision=precision, max_epochs=1, **QUIET)
        trainer.fit(module, batches(4))
        found.append(module)
        mixed, dtype = precision == "bf16-mixed", {"bf16-mixed": torch.float32}.get(precision, module.body.weight.dtype)
        assert module.inside == {("forward", mixed, dtype), ("hook", False, torch.float32)}
    automatic, by_hand, _ = found
    for name, value in automatic.state_dict().items():
        assert torch.equal(by_hand.state_dict()[name], value), name


def test_a_count_that_an_optimizer_makes_counts_on() -> None:
    for manual in (False, True):
        module = Partly(manual)
        trainer = Trainer(accelerator="cpu", precision="bf16-true", max_epochs=100, **QUIET)
        trainer.fit(module, batches(4))
        (state, *_) = trainer.optimizers[0].state.values()
        assert state["count"] == 400
