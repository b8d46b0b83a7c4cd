"""Deferred initialization: the same bits as a real construction, the same random numbers after it, little memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from examples.gpt.model import Transformer
from trainer.model.deferred_init import DeferredInit
from trainer.precision import default_dtype
from trainer.seed import isolated_rng, seed_everything


class Built(nn.Module):
    """A module whose `configure_model` builds `make()`, beside a layer that was built before."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make
        self.before = nn.Linear(2, 2)
        self.net: Any = None

    def configure_model(self) -> None:
        self.net = self.make()


def real_and_recorded(make: Callable[[], nn.Module]) -> tuple[Built, Built, DeferredInit, torch.Tensor]:
    """The module built for real, and as recorded; and the generator's state after the real construction."""
    with isolated_rng():
        seed_everything(3)
        real = Built(make)
        real.configure_model()
        after = torch.get_rng_state()
    seed_everything(3)
    module = Built(make)
    recording = DeferredInit(module)
    with recording:
        module.configure_model()
    return real, module, recording, after


def values_of(recording: DeferredInit, **options: Any) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = {}

    def take(name: str, value: torch.Tensor) -> None:
        assert name not in values
        assert value.device.type == "cpu"
        values[name] = value.clone()

    recording.materialize(take, **options)
    return values


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same(real: Built, module: Built, recording: DeferredInit, after: torch.Tensor) -> None:
    expected = tensors(real)
    shapes = {name: (t.shape, t.dtype, t.requires_grad) for name, t in expected.items()}
    assert {name: (t.shape, t.dtype, t.requires_grad) for name, t in tensors(module).items()} == shapes
    assert all(t.is_meta == (name in recording.names) for name, t in tensors(module).items())
    values = values_of(recording)
    for name, tensor in expected.items():
        value = values[name] if name in recording.names else tensors(module)[name]
        assert value.dtype == tensor.dtype
        assert torch.equal(value, tensor), name
    assert torch.equal(torch.get_rng_state(), after)


# -- the zoo -----------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """Much of what people do when they build a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5)) for _ in range(3))
        self.embedding = nn.Embedding(7, 5, padding_idx=2)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.noise = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.low = nn.Parameter(torch.rand(6).to(torch.bfloat16), requires_grad=False)
        position = torch.arange(6.0)
        frequency = torch.outer(position, 10000.0 ** -(torch.arange(0, 4, 2) / 4))
        self.register_buffer("rotary", torch.cat([frequency.sin(), frequency.cos()], dim=1), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        self.register_buffer("table", torch.tensor([[1, 2], [3, 4]]))
        self.register_buffer("view", self.rotary[1:3].t())
        self.apply(self.initialize)
        for number, layer in enumerate(self.layers):
            layer[2].weight.data.div_(math.sqrt(2.0 * (number + 1)))
        with torch.no_grad():
            self.layers[0][0].weight[1:3, ::2] = 5.0
            self.layers[1][0].bias.copy_(self.layers[1][0].weight.diagonal())
            self.noise[self.noise > 1] = 0.0

    @staticmethod
    def initialize(layer: nn.Module) -> None:
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            nn.init.normal_(layer.weight, std=0.02)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


class Initialized(nn.Module):
    """Every initializer that torch has."""

    def __init__(self) -> None:
        super().__init__()
        for number, initialize in enumerate(self.initializers()):
            weight = nn.Parameter(torch.empty(6, 4))
            initialize(weight)
            self.register_parameter(str(number), weight)
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))

    @staticmethod
    def initializers() -> list[Callable[[torch.Tensor], Any]]:
        init = nn.init
        return [
            *(init.ones_, init.zeros_, init.uniform_, init.normal_, init.eye_, init.orthogonal_, init.trunc_normal_),
            *(init.xavier_uniform_, init.xavier_normal_, init.kaiming_uniform_, init.kaiming_normal_),
            lambda w: init.trunc_normal_(w, std=2.0, a=-0.5, b=0.5),
            lambda w: init.trunc_normal_(w, mean=0.1, a=0.0, b=1.0),
            lambda w: init.sparse_(w, 0.3),
            lambda w: init.orthogonal_(w.data.t()),
            lambda w: w.data.bernoulli_(torch.rand(6, 4)),
            lambda w: w.data.copy_(nn.functional.dropout(torch.ones(6, 4))),
            lambda w: w.data.exponential_(),
            lambda w: init.uniform_(w, generator=torch.Generator().manual_seed(5)),
            lambda w: w.data.copy_(torch.multinomial(torch.rand(6, 9), 4)),
        ]


class Looking(nn.Module):
    """Construction that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        first = nn.Linear(4, 4)
        self.first = first if first.weight.sum() > 0 else nn.Linear(4, 3)
        self.second = nn.Linear(4, int(torch.randint(2, 9, ())))
        self.picked = nn.Parameter(first.weight.detach().flatten()[torch.nonzero(torch.eye(4).flatten())])
        self.chosen = nn.Parameter(self.second.weight.detach()[self.second.weight > 0])
        self.listed = nn.Parameter(torch.tensor(first.bias.tolist()) * 2)
        self.array = nn.Parameter(torch.from_numpy(first.bias.detach().numpy() + np.float32(1)))
        self.unique = nn.Parameter(torch.unique(torch.tensor([3.0, 1.0, 3.0])))


def seeds_inside() -> nn.Module:
    first = nn.Linear(3, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        second = nn.Linear(3, 3)
    third = nn.Linear(3, 3)
    torch.manual_seed(7)
    return nn.Sequential(first, second, third, nn.Linear(3, 3), nn.Linear(3, 3))


def copied() -> nn.Module:
    teacher = Own()
    student = copy.deepcopy(teacher)
    loaded = Own()
    loaded.load_state_dict(teacher.state_dict())
    kept = nn.Linear(3, 2)
    kept.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.from_numpy(np.zeros(2, dtype=np.float32))})
    return nn.ModuleList([teacher, student, loaded, kept, kept])


def shaped_first() -> nn.Module:
    """Built on the meta device by the user, then allocated and initialized, as Hugging Face does."""
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
        nn.init.normal_(layer.weight)
        layer.register_buffer("codes", torch.arange(3))
    assert layer.weight.is_meta
    assert layer.weight.device.type == "meta"
    layer.to_empty(device="cpu")
    assert not layer.weight.is_meta
    layer.reset_parameters()
    layer.codes.copy_(torch.nn.functional.one_hot(torch.tensor(1), 3))
    left = nn.Linear(2, 2, device="meta")
    return nn.Sequential(layer, nn.Linear(3, 3), Kept(left))


class Kept(nn.Module):
    """Holds a module that is none of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = [module]


def cast() -> nn.Module:
    with default_dtype(torch.bfloat16):
        low = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        low.register_parameter("made", nn.Parameter(torch.arange(4) / 3 + torch.tensor(0.5)))
    return nn.ModuleList([low, nn.Linear(3, 3).double(), nn.Linear(3, 3).to("cpu", torch.float16)])


ENCODER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
ZOO: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(40, 30),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose1d(2, 3, 3, bias=False)),
    "embeddings": lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=1), nn.EmbeddingBag(5, 3)),
    "LSTM": lambda: nn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=6, add_bias_kv=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER), 2),
    "transformer": lambda: nn.Transformer(num_encoder_layers=2, num_decoder_layers=2, **ENCODER),
    "norms": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm1d(3)),
    "GPT": lambda: Transformer(20, 8, 3, 2, 8, 0.1),
    "own": Own,
    "initializers": Initialized,
    "looking at values": Looking,
    "parametrized": lambda: parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(4, 3))),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "seeds inside": seeds_inside,
    "copied": copied,
    "cast": cast,
    "shaped first": shaped_first,
    "nothing drawn": lambda: nn.LayerNorm(4),
}


@pytest.mark.parametrize("name", ZOO)
def test_the_values_are_those_of_a_real_construction(name: str) -> None:
    real, module, recording, after = real_and_recorded(ZOO[name])
    assert "before.weight" not in recording.names
    assert_same(real, module, recording, after)


def test_the_zoo_notices_a_wrong_bit() -> None:
    real, module, recording, after = real_and_recorded(ZOO["linear"])
    with torch.no_grad():
        real.net.weight[3, 4].nextafter_(torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"net\.weight"):
        assert_same(real, module, recording, after)
