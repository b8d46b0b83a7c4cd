"""Layers build where they can: what initializes itself has the values of its construction; what cannot is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.helpers.hf_models import make
from tests.helpers.init_device_models import Block
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.model.init_device import build_context, initialize, units_of
from trainer.strategies import FSDPStrategy
from trainer.strategies.deepspeed.strategy import DeepSpeedStage3Strategy, DeepSpeedStrategy

ENCODER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}


ZOO: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(40, 30),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose1d(2, 3, 3, bias=False)),
    "embeddings": lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=1), nn.EmbeddingBag(5, 3)),
    "LSTM": lambda: nn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=6, add_bias_kv=True),
    "encoder": lambda: nn.ModuleList([nn.TransformerEncoderLayer(**ENCODER), nn.TransformerEncoderLayer(**ENCODER)]),
    "transformer": lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **ENCODER),
    "norms": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4)),
    "blocks": lambda: nn.Sequential(Block(), nn.Linear(3, 3, dtype=torch.bfloat16), Block()),
    "nothing to initialize": lambda: nn.Sequential(nn.ReLU()),
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with build_context("meta"):
        return make()


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("name", ZOO)
def test_modules_that_initialize_themselves_have_the_values_of_their_construction(name: str) -> None:
    torch.manual_seed(3)
    expected, after = values_of(ZOO[name]()), torch.get_rng_state()
    module = on_meta(ZOO[name])
    torch.manual_seed(3)
    found = {}
    for prefix, unit in units_of(module).items():
        values = initialize(unit, {name: tensor.to("meta") for name, tensor in values_of(unit).items()})
        found |= {prefix + name: value for name, value in values.items()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value), key
    assert torch.equal(torch.get_rng_state(), after)
    assert all(tensor.is_meta for tensor in values_of(module).values())


def test_a_tied_model_of_transformers_initializes_itself() -> None:
    pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    model = on_meta(lambda: make("Llama, tied"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    values = initialize(model, {name: tensor.to("meta") for name, tensor in values_of(model).items()})
    assert values["model.embed_tokens.weight"].std().item() == pytest.approx(model.config.initializer_range, rel=0.2)
    assert torch.equal(values["model.layers.0.input_layernorm.weight"], torch.ones(32))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_meta


@pytest.mark.parametrize(
    "buffer",
    [torch.ones(2), torch.arange(2), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)],
    ids=lambda buffer: str(buffer.dtype),
)
def test_a_buffer_without_values_is_refused(buffer: torch.Tensor) -> None:
    class Forgetful(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("table", buffer.clone(), persistent=False)

    module = on_meta(Forgetful).to("meta")
    with raises_recorded(ConfigError):
        initialize(module, values_of(module))


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_an_unknown_init_device_is_refused_at_once(strategy: type) -> None:
    with raises_recorded(ConfigError):
        strategy(init_device="mta")


def test_deepspeed_needs_stage_3_for_it() -> None:
    pytest.importorskip("deepspeed")
    from trainer.precision import PRECISIONS

    problems = DeepSpeedStrategy(stage=2, init_device="mixed").problems(PRECISIONS["32-true"], "cpu", 2)
    assert problems == ["init_device='mixed' needs stage 3, and the stage is 2."]
    assert DeepSpeedStage3Strategy(init_device="mixed").problems(PRECISIONS["32-true"], "cpu", 2) == []
