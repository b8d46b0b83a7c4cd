"""A model that is split over processes: layers, sequences and blocks, from an ordinary training_step."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn.functional import dropout, mse_loss, scaled_dot_product_attention
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.hf_models import LLM
from tests.helpers.processes import once_per_module, run_distributed
from tests.helpers.strategy_models import GPT, Transformer
from tests.helpers.strategy_runs import SINGLE, WAYS, StepLosses, run_each
from tests.messages import raises_recorded
from trainer import Callback, Trainer, TrainModule, seed_everything
from trainer.callbacks import ModelCheckpoint, PredictionWriter
from trainer.callbacks.prediction_writer import read_predictions
from trainer.errors import ConfigError
from trainer.precision import PRECISIONS
from trainer.strategies import FSDPStrategy
from trainer.strategies.parallel.messages import Neighbour
from trainer.strategies.parallel.plan import find_plan, needs_newer_torch, resolve_plan
from trainer.strategies.parallel.plan_check import PlanCheck
from trainer.strategies.parallel.refusals import refuse_collecting
from trainer.strategies.parallel.stage_checks import StageChecks
from trainer.strategies.parallel.verify import Verification, difference_of
from trainer.strategy import StepOptions

TWO = ("TP x2", "CP x2", "PP x2")
"""Ways of dividing a model over two processes."""
STEPS = 6


class Dropped(GPT):
    """Dropout around the blocks, and logged values of every kind."""

    def loss(self, batch: Any) -> torch.Tensor:
        assert self.net is not None
        self.net.tokens.weight.requires_grad_(True)
        inputs, targets = batch
        logits = dropout(self(inputs), 0.1, self.training)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("noise", torch.rand(()), on_step=False, on_epoch=True)
        return loss


class LocalValues(Callback):
    """Remember this process's own values of the parameters, and who it is."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        processes = trainer.strategy.processes
        self.who = (processes.rank, processes.reader, processes.readers, processes.reports)
        self.values = {
            name: p.detach().to_local().clone()  # type: ignore[operator]
            for name, p in module.named_parameters()
            if hasattr(p, "device_mesh")
        }


def trainer_of(way: str, folder: str, *callbacks: Callback, **settings: Any) -> Trainer:
    every = {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0, "log_every_n_steps": 1, "seed": 3}
    return WAYS[way].trainer(**{**every, "default_root_dir": folder, "callbacks": list(callbacks), **settings})


def fit(way: str, folder: str, steps: int = STEPS, go_on: bool = False) -> dict[str, Any]:
    values = LocalValues()
    saved = ModelCheckpoint(save_last=True, every_n_train_steps=1)
    trainer = trainer_of(way, folder, values, saved, max_steps=steps, enable_checkpointing=True)
    module = Dropped()
    loader = DataLoader(module.data(40), WAYS[way].micro_batch, shuffle=True)
    trainer.fit(module, loader, DataLoader(module.data(11), 4), ckpt_path="last" if go_on else None)
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": trainer.full_state_dict(everywhere=True),
        "local": values.values,
        "who": values.who,
    }


def everything(way: str, root: str) -> dict[str, Any]:
    """Train; train again with a break; evaluate and predict with the weights of the first training."""
    folder = f"{root}/{way}"
    found = {"unbroken": fit(way, f"{folder}/unbroken")}
    fit(way, f"{folder}/broken", steps=2)
    torch.manual_seed(99)
    found["resumed"] = fit(way, f"{folder}/broken", go_on=True)
    module = GPT()
    module.load_state_dict(found["unbroken"]["weights"])
    loader = DataLoader(module.data(11), 4)
    (found["evaluated"],) = trainer_of(way, folder).validate(module, loader)
    module = GPT()
    module.load_state_dict(found["unbroken"]["weights"])
    writer = PredictionWriter(f"{folder}/predictions")
    found["predictions"] = trainer_of(way, folder, writer).predict(module, loader, return_predictions=True)
    return found


@once_per_module
def results() -> dict[str, list[dict[str, Any]]]:
    with TemporaryDirectory() as root:
        found = run_each(everything, (SINGLE, *TWO), root)
        for way in TWO:
            found[way][0]["written"] = list(read_predictions(Path(root, way, "predictions")))
    return found


@pytest.mark.parametrize("way", TWO)
def test_metrics_are_those_of_one_process_on_every_rank(way: str, results: Any) -> None:
    expected = results[SINGLE][0]["unbroken"]["metrics"]
    for rank in results[way]:
        found = rank["unbroken"]["metrics"]
        assert found["samples"] == expected["samples"]
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=5e-2)  # dropout draws other numbers
        assert found["val_largest"] == expected["val_largest"]


@pytest.mark.parametrize("way", TWO)
def test_a_resumed_run_has_the_same_bits(way: str, results: Any) -> None:
    for rank in results[way]:
        assert_same_bits(rank["unbroken"], rank["resumed"])


@pytest.mark.parametrize("way", TWO)
def test_the_processes_of_one_model_are_one_reader(way: str, results: Any) -> None:
    readers = [rank["unbroken"]["who"][1:] for rank in results[way]]
    reporting = 1 if way == "PP x2" else 0
    assert readers == [(0, 1, rank == reporting) for rank in range(2)]


def test_weights_outside_of_the_plan_have_equal_bits(results: Any) -> None:
    first, second = (rank["unbroken"]["local"] for rank in results["TP x2"])
    equal = [
        name for name in first if first[name].shape == second[name].shape and torch.equal(first[name], second[name])
    ]
    unbroken = ("norm", "positions", "project.bias", "feed_forward.2.bias")
    assert {name for name in first if any(word in name for word in unbroken)} == set(equal)


@pytest.mark.parametrize("way", TWO)
def test_evaluation_and_prediction_are_those_of_one_process(way: str, results: Any) -> None:
    weights = results[way][0]["unbroken"]["weights"]
    module = GPT()
    module.load_state_dict(weights)
    loader = DataLoader(module.data(11), 4)
    single = Trainer(**QUIET)
    (expected,) = single.validate(module, loader)
    for rank in results[way]:
        assert rank["evaluated"] == pytest.approx(expected, rel=1e-5)
    outputs = single.predict(module, loader, return_predictions=True)
    assert outputs is not None
    torch.testing.assert_close(torch.stack(results[way][0]["written"]), torch.cat(outputs), rtol=1e-4, atol=1e-5)
    kept = [rank["predictions"] for rank in results[way] if rank["predictions"]]
    assert len(kept) == 1
    torch.testing.assert_close(torch.cat(kept[0]), torch.cat(outputs), rtol=1e-4, atol=1e-5)


def test_stages_have_parts_of_the_module(results: Any) -> None:
    first, last = (set(rank["unbroken"]["local"]) for rank in results["PP x2"])
    assert "net.tokens.weight" in first - last
    assert {"net.norm.weight", "net.head.weight"} <= last - first
    assert not {name for name in first & last if "blocks" in name}


# -- what cannot be split ----------------------------------------------------------------------------------------------


class Small(TrainModule):
    """A module of blocks that a test gives."""

    def __init__(self, *blocks: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Attending(nn.Module):
    """A block that is right for parts of sequences, unless a subclass breaks it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3, 4).permute(3, 0, 2, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class OwnPositions(Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.arange(x.shape[1])[:, None] / 10)


class OwnTable(Attending):
    """Positions from a table of the block's own, which begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table[: x.shape[1]])


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Zeros(TorchAttention):
    """As many models begin: the first forward of the attention adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.attention.out_proj.weight)


class Biased(Attending):
    """A mask that the block computes from its tokens, with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 2, 3, 4).permute(3, 0, 2, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=self.bias(x)[:, None, None, :, 0])
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Eager(Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


class EagerSmall(Eager):
    def __init__(self) -> None:
        super().__init__()
        for weight in (self.qkv.weight, self.out.weight):
            nn.init.normal_(weight, std=0.02)


class CastAttending(Attending):
    """Computes in 16 bits in parts, whatever the precision of the run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + super().forward(x.half().to(x.dtype)).to(x.dtype)


class Convolved(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.convolution(x.transpose(1, 2)).transpose(1, 2))


class Normalized(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class Fused(Attending):
    """Queries, keys and values one after the other in a layer, which is not grouped by heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class FusedSmall(Fused):
    """Adds little to what it reads, as the blocks of a fresh GPT-2 do."""

    def __init__(self) -> None:
        super().__init__()
        for weight in (self.qkv.weight, self.out.weight):
            nn.init.normal_(weight, std=0.02)


class FusedZeros(Fused):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)


class Sloped(Attending):
    """Biases of heads that go by how many there are, and a buffer and an attribute that count the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("counted", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.counted += 1  # type: ignore[operator]
        q, k, v = self.qkv(x).view(*x.shape[:2], -1, 3, 4).permute(3, 0, 2, 1, 4)
        slopes = torch.arange(q.shape[1]) / q.shape[1]
        bias = slopes[:, None, None] * torch.arange(x.shape[1]) * self.calls
        attended = scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Counting(Sloped):
    """The same without the biases."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.counted += 1  # type: ignore[operator]
        return Attending.forward(self, x) * (1 + self.calls * self.counted / 100)


class Adding(Attending):
    """Returns a loss, and the sums of its tokens."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.qkv(x).square().mean(), x.mean(-1) / 8


class AddingTokens(Adding):
    def forward(self, x: torch.Tensor) -> Any:
        return *super().forward(x)[::2], None


class Named(Attending):
    def forward(self, x: torch.Tensor) -> Any:
        return {"hidden": super().forward(x)}


class Tuples(Attending):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class Keeping(Attending):
    """Has a loss of its own, as routers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses = [self.qkv(x).square().sum()]
        return super().forward(x)


class AddingLosses(Small):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + sum(block.losses[0] for block in self.blocks)  # type: ignore[operator, index]


class SkippingLast(Small):
    """Leaves the last block out in training only, as a random depth may."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in [*self.blocks][:-1] if self.skips else self.blocks:
            x = block(x)
        return x.mean(1, keepdim=True)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            output = self(batch[0])
        self.skips = True
        return output


class Centred(SkippingLast):
    """Tokens are mixed, and get their positions, between two blocks; one step in two has a block less."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number and not self.skips:
                x = x - x.mean(1, keepdim=True) + torch.arange(x.shape[1])[:, None] / 10
            if number == 0 or not self.skips:
                x = block(x)
        self.skips = self.training and not self.skips
        return x.cumsum(1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Unpacking(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)[0]
        return x


class Summed(Small):
    """Uses the second output of each block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.embed(x), torch.zeros(())
        for block in self.blocks:
            x, of_tokens, *_ = block(x)
            total = total + of_tokens.cumsum(-1).mean()
        return x + total


class Kept(Small):
    """Uses the outputs of all blocks at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, outputs = self.embed(x), []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return torch.stack([output.cumsum(1) for output in outputs]).mean(0)


class TiedKept(Kept):
    """The last stage has the weights before the blocks as well, so that what it passes by is no NaN by itself."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.head = nn.Linear(8, 8)
        self.head.weight, self.head.bias = self.embed.weight, self.embed.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


class Tabled(Attending):
    """Takes a table of (1, tokens, features)."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + table)


class LongLater(Small):
    """From the second batch on there are as many tokens as features."""

    lengths = (6, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = inputs = batch[0][:, : self.lengths[batch_idx > 0]]
        x, table = self.embed(x), torch.arange(x.shape[1] * 8).view(1, -1, 8) % 7 / 7
        for block in self.blocks:
            x = block(x, table)
        return mse_loss(x, inputs)


class LongFirst(LongLater):
    lengths = (8, 6)


class Rotating(nn.Module):
    """Takes and returns complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight)


class Complex(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.complex(self.embed(x), x)
        for block in self.blocks:
            x = block(x)
        return x.real * x.imag


class SamePlace(Small):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks[:1], *blocks[:1], *blocks[1:])


class Compiled(Small):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        for block in blocks:
            block.compile(backend="eager")


class Skipping(Small):
    """The last block's input has a part that does not come through the block before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x + first


class HeadFirst(Small):
    """The head is registered before the blocks, so that the first stage has it."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        del self.blocks
        self.head = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


class Twice(Small):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self(batch[0]), self(batch[0] + 1))


class ReadsKept(Small):
    """The validation, and nothing else, reads what its blocks keep."""

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.eval()(batch[0])  # as in a run
        return torch.stack([block.kept.mean() for block in self.blocks]).sum()


class KeepsInEvaluation(Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if not self.training:
            self.kept = output.square()
        return output


class Conditioned(Attending):
    """Reads a mean over all tokens, and a bias for pairs of tokens, which are computed between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mean: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x + self.read(mean)[:, None]).view(*x.shape[:2], 2, 3, 4).permute(3, 0, 2, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=pairs)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Pooled(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, x.mean(1), (x @ x.transpose(1, 2))[:, None])
        return x


class PutIntoBlocks(Small):
    """Hands a mean over the tokens to the next block, but not as an argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            vars(block)["mean"] = x.mean(1)
            x = block(x)
        return x


class ReadsMean(Attending):
    mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.mean[:, None])


class KeepsPart(Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.qkv(x).square().mean()
        return super().forward(x)


class LogsPart(KeepsPart):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.kept = self.kept.detach()
        return output


class ReturnsPart(KeepsPart):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.kept


class Planned(Small):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}


class Penalized(Planned):
    """A gradient penalty, of which second gradients are taken."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()


class PenalizedWithin(Attending):
    """The same in a block, at its first layer alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(self.qkv(x).square().sum(), x, create_graph=True)
        return super().forward(x) + gradient


class TakesBias(Attending):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], -1, 3, 4).permute(3, 0, 2, 1, 4)
        return x + self.out(scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class LateBias(Planned):
    """A bias for all blocks that is registered after them, so that the last stage has it."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.bias = nn.Embedding(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.bias.weight)
        return x


class LateBiasValidated(LateBias):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


class PlannedKept(Planned):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + sum(block.kept for block in self.blocks)  # type: ignore[operator]


class PlannedReturned(Planned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.embed(x), torch.zeros(())
        for block in self.blocks:
            x, of_block = block(x)
            total = total + of_block
        return x + total


class Checkpointed(Planned):
    """Recomputes its blocks by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x


class MaskFirst(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        x = self.embed(x)
        for block in self.blocks:
            x = block(mask=mask, x=x)
        return x


class TakesMask(Attending):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * mask[0, 0]


class WeightNormed(Attending):
    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.out)


class Softmaxed(nn.Module):
    """A softmax of split features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).softmax(-1))


class PlannedAround(Small):
    """A pair of split layers outside of the blocks."""

    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"tail.up": "colwise", "tail.down": "rowwise"}

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.tail = Softmaxed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(super().forward(x))


class PlannedToTheEnds(Planned):
    """What goes into the first block, which is compiled, is a sum over processes."""

    tensor_parallel_plan: ClassVar[dict[str, Any]] = {
        **Planned.tensor_parallel_plan,
        "embed": RowwiseParallel(input_layouts=Replicate()),
    }

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        for block in blocks:
            block.compile(backend="aot_eager")


class ChangedGradients(PlannedToTheEnds):
    """Clears and changes the gradients of the module's parameters, which are split by the plan and not."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        self.embed.weight.grad = None
        self.optimizers().step()  # type: ignore[union-attr]


class Adapted(nn.Module):
    """A layer with an adapter, as PEFT makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.added = nn.Linear(8, 24), nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = self.base_layer(x) + self.added(x)
        return both


class WithAdapters(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Adapted()  # type: ignore[assignment]


class HalfPlanned(Small):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"blocks.*.qkv": "colwise"}


class Normed(Attending):
    """A norm of each head's queries, which processes have parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], -1, 3, 4).permute(3, 0, 2, 1, 4)
        attended = scaled_dot_product_attention(self.norm(q), k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Scaled(Attending):
    """A number that multiplies split features a little, and full ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], -1, 3, 4).permute(3, 0, 2, 1, 4)
        attended = scaled_dot_product_attention(q, k, v * (1 + 0.01 * self.scale), is_causal=True)
        return x * self.scale + self.out(attended.transpose(1, 2).flatten(2))


class HeadInParts(Small):
    """A loss of this process's part of the outputs."""

    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"embed": "colwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.embed(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).square().mean()


class NotByHeads(Small):
    """Full features are read by no split heads."""

    tensor_parallel_plan: ClassVar[dict[str, Any]] = {**Planned.tensor_parallel_plan, "embed": "shared_by_heads"}


class OneKey(nn.Module):
    """Multi-query attention: all heads read the same key and value. And layers whose outputs are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.act(self.q(x)).view(*x.shape[:2], -1, 4).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, -1)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2)).add_(x)


class Shared(Small):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {
        "blocks.*.q": "colwise",
        "blocks.*.kv": "shared_by_heads",
        "blocks.*.out": "rowwise",
    }


class Sequences(Small):
    """Activations are split along the sequence between layers, and the logits stay split; a norm's weight is frozen."""

    tensor_parallel_plan: ClassVar[dict[str, Any]] = {
        "embed": "embedding_to_sequence",
        "blocks.*.qkv": "colwise_from_sequence",
        "blocks.*.out": "rowwise_to_sequence",
        "norm": "sequence_parallel",
        "head": "colwise_loss_parallel",
    }

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.norm, self.head, self.weight = nn.LayerNorm(8), nn.Linear(8, 8), nn.Parameter(torch.ones(1))
        self.norm.weight.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.norm(self(batch[0])))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[0].argmax(-1).flatten())
        loss = loss + self.weight.square().sum()
        self.log("loss", loss)
        return loss


class NotShared(Small):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"blocks.*.q": "colwise", "blocks.*.out": "rowwise"}


class Packed(Small):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"blocks.*.qkv": "packed_colwise"}


class TiedApart(Small):
    """One weight in two layers that the plan splits in different ways."""

    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"embed": "colwise_gather_output", "head": "rowwise_split_input"}

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight


class Encoded(Small):
    """An encoder and a decoder: two lists of blocks, the second of which reads what the first one makes."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.decoder = nn.ModuleList(type(block)() for block in blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded = super().forward(x)
        for block in self.decoder:
            x = block(x + encoded)
        return x


class OneBlock(Small):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks[:1])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gru(x)[0]


class FixedHeads(Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 2, 3, 4).permute(3, 0, 2, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class OneHead(Attending):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class ClosedPlan(Planned):
    """The optimizer needs a closure."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Backwards(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Unmatched(Small):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"block.*.qkv": "colwise"}


class Unknown(Small):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"blocks.*.qkv": "columnwise"}


class Uneven(Small):
    tensor_parallel_plan: ClassVar[dict[str, Any]] = {"head": "colwise"}

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.head = nn.Linear(8, 7)


CP, PP, TP = {"context_parallel": 2}, {"pipeline_parallel": 2}, {"tensor_parallel": 2}
REFUSED: dict[str, tuple[dict[str, Any], type[Small], type[nn.Module], str]] = {
    "recurrent layers": (CP, Small, Recurrent, "blocks.0.gru is of class GRU, which mixes tokens in another way"),
    "heads that cannot be exchanged": (
        {**CP, "context_exchange": "heads"},
        Small,
        OneHead,
        "context_parallel=2 does not divide 1 heads of attention: give context_exchange='keys'",
    ),
    "an encoder and a decoder": (PP, Encoded, Attending, "in several lists, and a pipeline runs through one"),
    "fewer blocks than stages": (PP, OneBlock, Attending, "pipeline_parallel=2 needs at least 2 repeated blocks"),
    "packed weights": (TP, Packed, Attending, "is not a style"),
    "ties that are split apart": (TP, TiedApart, Attending, "are one weight, and are split differently"),
    "a fixed number of heads": (TP, Planned, FixedHeads, "view heads as -1"),
    "LBFGS with parts of layers": (TP, ClosedPlan, Attending, "LBFGS with tensor_parallel=2: it evaluates the loss"),
    "LBFGS with parts of sequences": (CP, ClosedPlan, Attending, "LBFGS with context_parallel=2: it evaluates"),
    "LBFGS with stages": (PP, ClosedPlan, Attending, "LBFGS with pipeline_parallel=2: it evaluates the loss"),
    "positions inside of blocks": (CP, Small, OwnPositions, "positions as arguments"),
    "positions from a table of zeros": (CP, Small, OwnTable, "positions as arguments"),
    "positions inside of compiled blocks": (CP, Compiled, OwnPositions, "positions as arguments"),
    "torch's attention": (CP, Small, TorchAttention, "blocks.0.attention is of class MultiheadAttention"),
    "attention that begins with zeros": (CP, Small, Zeros, "blocks.0.attention is of class MultiheadAttention"),
    "statistics of a batch": (CP, Small, Normalized, "blocks.0.batch_norm is of class BatchNorm1d"),
    "a loss that blocks return": (CP, Summed, Adding, "blocks.0 returns a second tensor with a gradient"),
    "a dict": (CP, Small, Named, "a block returns a dict"),
    "attention by hand": (CP, Small, Eager, "scaled_dot_product_attention only"),
    "convolutions": (CP, Small, Convolved, "convolutions"),
    "a loss that blocks keep": (CP, AddingLosses, Keeping, "what it leaves in losses is wrong by"),
    "what blocks keep in evaluation": (CP, ReadsKept, KeepsInEvaluation, "what it leaves in kept is wrong by"),
    "a last block that is skipped": (CP, SkippingLast, Attending, "has not called the last block"),
    "a skip connection": (PP, Skipping, Attending, "embed"),
    "kept outputs, with tied ends": (
        PP,
        TiedKept,
        Attending,
        "what another stage has: the outputs of blocks of earlier stages",
    ),
    "a head that is registered before the blocks": (PP, HeadFirst, Attending, "what another stage has: head."),
    "one block in two places": (PP, SamePlace, Attending, "blocks.0 and blocks.1 are one block"),
    "two forwards": (PP, Twice, Attending, "called twice"),
    "one layer of a pair": (TP, HalfPlanned, Attending, "give both of a pair"),
    "a fused layer": (TP, Planned, Fused, "(a fused qkv, gate and up)"),
    "a fused layer that reads parts of sequences": (TP, Sequences, Fused, "(a fused qkv, gate and up)"),
    "positions of parts of sequences": (TP, Sequences, OwnPositions, "pass positions and lengths as arguments"),
    "a fused layer that begins with zeros": (TP, Planned, FusedZeros, "(a fused qkv, gate and up)"),
    "numbers by the count of heads": (TP, Planned, Sloped, "that go by the count of heads"),
    "a norm of split heads": (TP, Planned, Normed, "the gradient of norm."),
    "a loss of split outputs": (TP, HeadInParts, Attending, "the loss differs between the processes"),
    "sums of gradients that are complete": (TP, NotByHeads, Attending, "of a layer of 8 outputs that are the same on"),
    "a key that split heads read": (TP, NotShared, OneKey, "'shared_by_heads' for a layer whose outputs"),
    "no plan": (TP, Small, Attending, "has no tensor_parallel_plan"),
    "a pattern without a match": (TP, Unmatched, Attending, "nothing matches 'block.*.qkv'"),
    "an unknown style": (TP, Unknown, Attending, "Did you mean 'colwise'"),
    "layers with adapters": (TP, Planned, WithAdapters, "is of class Adapted from"),
    "a loss of split features that blocks keep": (TP, PlannedKept, KeepsPart, "what it leaves in kept is wrong by"),
    "a loss of split features that blocks return": (TP, PlannedReturned, ReturnsPart, "its output 2 is wrong by"),
    "a pair of layers outside of the blocks": (TP, PlannedAround, Attending, "tail (Softmaxed) does not compute the"),
    "weights that are computed": (TP, Planned, WeightNormed, "blocks.0.out is of class ParametrizedLinear from"),
    "split layers that the module recomputes": (TP, Checkpointed, Attending, "is called by torch.utils.checkpoint"),
    "parts of sequences that it recomputes": (CP, Checkpointed, Attending, "is called by torch.utils.checkpoint"),
    "an input that is no argument": (CP, PutIntoBlocks, ReadsMean, "is none of its arguments: pass it as one"),
    "a mask before the tokens": (CP, MaskFirst, TakesMask, "gets torch.bool as its first argument"),
    "a gradient penalty of split layers": (TP, Penalized, Attending, "second gradients, as of a gradient penalty, "),
    "a gradient penalty in a block": (TP, Planned, PenalizedWithin, "second gradients, as of a gradient penalty, "),
    "a gradient penalty of parts of sequences": (CP, Penalized, Attending, "second gradients, as of a gradient"),
    "outputs that cannot be split": (TP, Uneven, Attending, "does not divide the 7 outputs of head"),
}
AT_THE_START = (
    "recurrent layers",
    "an encoder and a decoder",
    "fewer blocks than stages",
    "packed weights",
    "ties that are split apart",
    "LBFGS with parts of layers",
    "LBFGS with parts of sequences",
    "LBFGS with stages",
    "torch's attention",
    "attention that begins with zeros",
    "statistics of a batch",
    "one block in two places",
    "no plan",
    "a pattern without a match",
    "an unknown style",
    "layers with adapters",
    "weights that are computed",
    "outputs that cannot be split",
)
"""What is found before the first step, the names of `REFUSED`."""
LENGTHS = {"odd": 7, "short": 2}


def refusal(
    kind: type[Small],
    block: type[nn.Module],
    options: dict[str, Any],
    length: int = 8,
    config: StepOptions = StepOptions(),  # noqa: B008
    precision: str = "32-true",
) -> str:
    """Return the error of a first step, without a Trainer, which would end the other process too."""
    torch.manual_seed(0)
    strategy, module = FSDPStrategy(**options), kind(block(), block())
    strategy.setup_environment("cpu", PRECISIONS[precision])
    try:
        strategy.setup_module(module, for_training=True)
        (optimizer,) = strategy.setup_optimizers([module.configure_optimizers()], config)
    except ConfigError as error:
        return f"at the start: {error}"
    batch = torch.randn(4, length, 8, dtype=PRECISIONS[precision].weights)
    try:
        if module.overrides("validation_step"):  # as before the training
            with torch.no_grad():
                strategy.call_step("validation_step", [batch], 0)
        strategy.backward(strategy.call_step("training_step", [batch], 0))
        strategy.step(optimizer)
    except ConfigError as error:
        return str(error)
    return ""


def refuse_all() -> dict[str, str]:
    found = {name: refusal(kind, block, options) for name, (options, kind, block, _) in REFUSED.items()}
    found |= {name: refusal(Small, Attending, CP, length) for name, length in LENGTHS.items()}
    found["odd, with a plan"] = refusal(Sequences, Attending, TP, LENGTHS["odd"])
    found["layers, not verified"] = refusal(Planned, Fused, {**TP, "verify": False})
    found["sequences, not verified"] = refusal(Small, Convolved, {**CP, "verify": False})
    as_one = StepOptions(compiles_module=True)
    return found | {"compiled as one": refusal(Planned, Attending, TP, config=as_one)}


LOW = ("bf16-mixed", "bf16-true", "16-true")
IN_LOW_PRECISION: dict[str, tuple[dict[str, Any], type[Small], type[nn.Module], str]] = {
    "a fused layer": (TP, Planned, FusedSmall, "(a fused qkv, gate and up)"),
    "attention by hand": (CP, Small, EagerSmall, "scaled_dot_product_attention only"),
    "a weight of full and of split features": (TP, Planned, Scaled, "the gradient of scale is wrong by"),
    "blocks that compute in 16 bits by themselves": (TP, Planned, CastAttending, ""),
    "blocks with casts that can be split": (CP, Small, CastAttending, ""),
}


def refuse_in_low_precision(cases: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    return {
        (name, precision): refusal(*IN_LOW_PRECISION[name][1:3], IN_LOW_PRECISION[name][0], precision=precision)
        for name, precision in cases
    }


low_refusals = once_per_module(
    lambda cases: run_distributed(refuse_in_low_precision, 2, cases, timeout=90.0), "low", "precision"
)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("low", IN_LOW_PRECISION)
def test_plans_are_verified_in_float32_whatever_the_precision(low: str, precision: str, low_refusals: Any) -> None:
    words = IN_LOW_PRECISION[low][3]
    for of_rank in low_refusals:
        assert words in of_rank[low, precision] if words else of_rank[low, precision] == ""


refusals = once_per_module(lambda: run_distributed(refuse_all, 2, timeout=90.0))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_reported_in_the_first_step(name: str, refusals: Any) -> None:
    assert any(REFUSED[name][3] in of_rank[name] for of_rank in refusals)


@pytest.mark.parametrize("name", ["layers", "sequences"])
def test_the_verification_can_be_left_out(name: str, refusals: Any) -> None:
    for of_rank in refusals:
        assert of_rank[f"{name}, not verified"] == ""


def test_compiling_a_split_module_as_one_is_refused_at_the_start(refusals: Any) -> None:
    for of_rank in refusals:
        assert of_rank["compiled as one"].startswith("at the start: compile=True with a model that is split over")


def test_what_modules_and_plans_say_is_reported_at_the_start(refusals: Any) -> None:
    early = {name for name in REFUSED for of_rank in refusals if of_rank[name].startswith("at the start")}
    assert early == set(AT_THE_START)


def test_split_features_that_nothing_compares_are_named(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "tail": Softmaxed()})
    styles = resolve_plan(module, {"up": "colwise", "down": "rowwise", **PlannedAround.tensor_parallel_plan}, 2)
    PlanCheck(module, styles, None, Verification(True)).watch({}, {})  # type: ignore[arg-type]
    assert "nothing compares what is computed between up and the next layer" in caplog.text


@pytest.mark.parametrize(
    ("found", "share"),
    [
        ([1.0, 5.0, 2.0], 0.0),
        ([1.0 + 3e-4, 5.0, 2.0], 0.0),  # half of the digits of float32
        ([1.0 + 2e-3, 5.0, 2.0], 2e-3 / 5**0.5),
        ([1.0, 5.0, 4.0], 2 / 5**0.5),
        ([1.0, 5.0, math.nan], math.inf),
        ([math.inf] * 3, math.inf),
        ([1.0, 2.0], math.inf),
        (None, math.inf),
    ],
)
def test_what_is_not_finite_in_what_is_expected_is_not_compared(found: list[float] | None, share: float) -> None:
    expected = torch.tensor([1.0, math.nan, 2.0])
    other = None if found is None else torch.tensor(found)
    assert difference_of(other, expected, 1.5, torch.finfo(torch.float32).eps).item() == pytest.approx(share, rel=1e-3)


def refusal_by_one(kind: type[Small], block: type[nn.Module], options: dict[str, Any]) -> str:
    try:
        return refusal(kind, block, options)
    except RuntimeError:
        return ""  # a process that waits for one that has refused


@pytest.mark.parametrize(
    ("options", "kind", "because"),
    [
        (PP, LateBiasValidated, "what another stage has: bias.weight"),
        ({**PP, **TP}, LateBias, "what another stage has: bias.weight"),
        ({**PP, **CP}, LateBiasValidated, "what another stage has: bias.weight"),
    ],
    ids=["stages", "and layers", "and sequences"],
)
def test_stages_name_what_they_lack_before_split_blocks_are_compared(
    options: dict[str, Any], kind: type[Small], because: str
) -> None:
    found = run_distributed(partial(refusal_by_one, kind, TakesBias, options), 2 ** len(options), timeout=90.0)
    said = {one for one in found if one}
    assert said
    for words in said:
        assert words.startswith("pipeline_parallel: the output of blocks.0 (TakesBias) is not finite")
        assert because in words
        assert "register it again, before fit: `last = decoder.norm; del decoder.norm" in words


OTHER_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}


def test_heads_of_models_that_cannot_be_split_are_refused_before_anything_is_split() -> None:
    transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    sizes = {**LLM, "hidden_size": 24, **OTHER_HEADS}
    module = nn.ModuleDict({"net": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))})
    with raises_recorded(ConfigError):
        resolve_plan(module, find_plan(module), 2)


class OfTransformers(Small):
    """A model whose config chooses the attention."""

    def __init__(self, attention: str, **config: int) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        sizes = {**LLM, "hidden_size": 48, "attn_implementation": attention, **config}
        self.net = LlamaModel(LlamaConfig(**sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(inputs_embeds=x.repeat(1, 1, 6)).last_hidden_state[..., :8]


def refuse_models() -> list[str]:
    eager: Any = lambda *blocks: OfTransformers("eager")  # noqa: E731
    odd: Any = lambda *blocks: OfTransformers("sdpa", **OTHER_HEADS)  # noqa: E731
    return [refusal(eager, nn.Identity, CP), refusal(odd, nn.Identity, {**CP, "context_exchange": "heads"})]


def test_the_attention_of_models_is_compared_with_that_of_full_sequences() -> None:
    pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    for another, odd in run_distributed(refuse_models, 2):
        assert 'attn_implementation="sdpa"' in another
        assert "does not divide 3 heads of attention: give context_exchange='keys'" in odd


@pytest.mark.parametrize("in_config", [True, False], ids=["in the config", "in a call"])
def test_losses_of_routers_are_refused(in_config: bool) -> None:
    transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    sizes = {**LLM, "num_hidden_layers": 1, "num_local_experts": 2, "output_router_logits": in_config}
    module = nn.ModuleDict({"net": transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))})
    tokens = torch.ones(1, 4, dtype=torch.long)
    refuse_collecting("context_parallel", module)
    if not in_config:
        module["net"](tokens)
    with raises_recorded(ConfigError):
        module["net"](tokens, **({} if in_config else {"output_router_logits": True}))


def test_what_models_collect_from_their_blocks_is_refused_and_so_is_generating() -> None:
    transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    module = nn.ModuleDict({"net": transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLM))})
    refuse_collecting("context_parallel", module)
    tokens = torch.ones(1, 4, dtype=torch.long)
    with raises_recorded(ConfigError):
        module["net"](tokens, output_hidden_states=True)
    with raises_recorded(ConfigError):
        module["net"].generate(tokens)


def test_outputs_of_earlier_stages_stay_nan() -> None:
    first, hidden = StageChecks(nn.Linear(1, 1), 1, set(), [], [], Verification(True)), torch.ones(2)
    assert first.pass_by(hidden).isnan().all()
    first.end_forward(None, is_loss=False)
    assert first.pass_by(hidden).isnan().all()
    with torch.no_grad():
        assert first.pass_by(hidden).isnan().all()


def train(way: str, kind: type[Small], block: type[nn.Module]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module, trainer = kind(block(), block()), WAYS[way].trainer(max_steps=3)
    data = torch.randn(24, 8, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(data), 8))
    return trainer.full_state_dict(everywhere=True)


TRAINED: dict[str, tuple[str, type[Small], type[nn.Module]]] = {
    "a mask that is computed from tokens": ("CP x2", Small, Biased),
    "tokens that are mixed between two blocks": ("CP x2", Centred, Attending),
    "what is computed of all tokens between two blocks": ("CP x2", Pooled, Conditioned),
    "what is computed of all tokens, with gathered keys": ("CP x2, keys", Pooled, Conditioned),
    "what blocks keep of split features to log it": ("TP x2", Planned, LogsPart),
    "outputs of blocks that are kept": ("CP x2", Kept, Attending),
    "second outputs of blocks": ("CP x2", Summed, AddingTokens),
    "as many tokens as features, from the second batch on": ("CP x2", LongLater, Tabled),
    "as many tokens as features, in the first batch": ("CP x2", LongFirst, Tabled),
    "forwards that count, in parts of sequences": ("CP x2", Small, Counting),
    "forwards that count, in split layers": ("TP x2", Planned, Counting),
    "one key for all heads, and layers whose outputs change in place": ("TP x2", Shared, OneKey),
    "activations that are split along the sequence, and split logits": ("TP x2", Sequences, Attending),
    "complex numbers between stages": ("PP x2", Complex, Rotating),
    "a sum over processes that goes into a compiled block": ("TP x2", PlannedToTheEnds, Attending),
    "gradients that a step changes by itself": ("TP x2", ChangedGradients, Attending),
}


def train_all(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(*case) for name, case in TRAINED.items() if name in names}


trained = once_per_module(lambda names: run_distributed(train_all, 2, names, timeout=120.0), "name")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by dynamo
@pytest.mark.parametrize("name", TRAINED)
def test_every_part_has_its_gradient(name: str, trained: Any) -> None:
    expected = train(SINGLE, *TRAINED[name][1:])
    for of_rank in trained:
        torch.testing.assert_close(of_rank[name], expected, rtol=1e-5, atol=1e-6)


NOT_SENT: dict[str, tuple[type[Small], type[nn.Module], str]] = {
    "losses that blocks keep": (AddingLosses, Keeping, "leaves a tensor with a gradient in losses"),
    "what blocks keep in evaluation": (ReadsKept, KeepsInEvaluation, "leaves a tensor with a gradient in kept"),
    "tuples": (Unpacking, Tuples, "returns a tuple, and what a stage sends is one tensor"),
    "blocks in another order": (Backwards, Attending, "in the order in which they are registered"),
    "blocks that the module recomputes": (Checkpointed, Attending, "is called by torch.utils.checkpoint"),
    "a mask before the tokens": (MaskFirst, TakesMask, "gets torch.bool as its first argument"),
}
"""Mistakes that one stage finds while another one waits for it."""


def train_without_sending(name: str) -> None:
    kind, block, _ = NOT_SENT[name]
    trainer = Trainer(strategy=FSDPStrategy(**PP), devices=2, accelerator="cpu", max_steps=1, **QUIET)
    loader = DataLoader(TensorDataset(torch.ones(4, 8, 8)), 4)
    trainer.fit(kind(block(), block()), loader, loader if issubclass(kind, ReadsKept) else None)


@pytest.mark.parametrize("name", NOT_SENT)
def test_a_stage_that_cannot_send_ends_the_others(name: str) -> None:
    with pytest.raises(AssertionError) as error:
        run_distributed(train_without_sending, 2, name, timeout=90.0)
    assert NOT_SENT[name][2] in str(error.value)


@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_that_cannot_be_split_are_reported(name: str, refusals: Any) -> None:
    assert f"does not divide sequences of {LENGTHS[name]} tokens" in refusals[0][name]


def test_sequences_that_a_plan_cannot_split_are_reported(refusals: Any) -> None:
    for of_rank in refusals:
        assert "tensor_parallel=2 does not divide sequences of 7 tokens" in of_rank["odd, with a plan"]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"tensor_parallel": 3}, {"devices": 4}),
        ({"tensor_parallel": 2}, {"devices": 2, "precision": "16-mixed"}),
        ({"tensor_parallel": 2}, {"devices": 2, "precision": "mxfp8"}),
        ({"pipeline_parallel": 2, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}, {"devices": 4}),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_reported_before_anything_starts(
    options: dict[str, Any], settings: dict[str, Any]
) -> None:
    with raises_recorded(ConfigError):
        Trainer(strategy=FSDPStrategy(**options), accelerator="cpu", **{**QUIET, **settings})


def test_a_plan_that_splits_sequences_is_refused_with_context_parallel() -> None:
    strategy = FSDPStrategy(tensor_parallel=2, context_parallel=2)
    (problem,) = strategy.problems(PRECISIONS["32-true"], "cpu", 4, None, Sequences(Attending()))
    assert "a style of tensor_parallel_plan that splits sequences, too" in problem


@pytest.mark.parametrize(("version", "refused"), [("2.9.1+cu128", True), ("2.13.0+cpu", False)])
def test_a_head_after_norms_of_parts_of_sequences_is_refused_where_torch_cannot(version: str, refused: bool) -> None:
    styles = Sequences.tensor_parallel_plan.values()
    assert [
        f"after 'sequence_parallel' needs a newer torch than {version}" in p for p in needs_newer_torch(styles, version)
    ] == ([True] * refused)
    assert needs_newer_torch(Planned.tensor_parallel_plan.values(), version) == []


def test_manual_optimization_is_refused_with_a_pipeline() -> None:
    module = Small(Attending())
    module.automatic_optimization = False
    (problem,) = FSDPStrategy(pipeline_parallel=2).problems(PRECISIONS["32-true"], "cpu", 2, None, module)
    assert "pipeline_parallel runs the backward of each micro-batch itself" in problem


def test_an_override_of_backward_is_refused_with_a_pipeline() -> None:
    class Scaled(Small):
        def backward(self, loss: torch.Tensor) -> None:
            (loss * 10).backward()

    (problem,) = FSDPStrategy(**PP).problems(PRECISIONS["32-true"], "cpu", 2, None, Scaled(Attending()))
    assert "without an override of backward" in problem
    assert FSDPStrategy(**TP).problems(PRECISIONS["32-true"], "cpu", 2, None, Scaled(Attending())) == []


def test_the_test_model_has_a_plan_that_divides_its_layers() -> None:
    names = {name for name, child in Transformer(False, False).named_modules() if isinstance(child, nn.Linear)}
    assert len(names) == 9


OPTIONS: dict[str, tuple[str, tuple[tuple[str, Any], ...], dict[str, Any]]] = {
    "layers built on rank 0 only": ("TP x2", (("init_device", "mixed"),), {}),
    "compiled blocks, by the name of their class": (
        "CP x2",
        (),
        {"compile": {"blocks": ["Block"], "backend": "eager"}},
    ),
    "recomputed activations": ("CP x2", (), {"activation_checkpointing": "auto"}),
    "recomputed activations of stages": ("PP x2", (), {"activation_checkpointing": "auto"}),
    "weights in the CPU's memory": ("PP x2", (("cpu_offload", True),), {}),
    "weights of stages, a block at a time": ("PP x2", (("reshard_after_forward", True),), {}),
    "windows shorter than the pipeline": ("PP x2", (), {"accumulate_grad_batches": 1}),
}


def train_with_options(names: list[str]) -> dict[str, list[float]]:
    found = {}
    for name in names:
        way, options, settings = OPTIONS[name]
        recorder, module = StepLosses(), GPT(tied=True, deferred=True)
        strategy = replace(WAYS[way], options=(*WAYS[way].options, *options))
        every = {"accumulate_grad_batches": 3, "log_every_n_steps": 1, "seed": 3, "max_steps": 4}
        loader = DataLoader(module.data(40), WAYS[way].micro_batch)
        strategy.trainer(callbacks=[recorder], **{**every, **settings}).fit(module, loader)
        found[name] = recorder.losses
    return found


with_options = once_per_module(lambda names: run_distributed(train_with_options, 2, names), "combination")


@pytest.mark.parametrize("combination", OPTIONS)
def test_options_of_strategy_and_trainer_work_together(
    combination: str, with_options: list[dict[str, list[float]]]
) -> None:
    recorder, module = StepLosses(), GPT(tied=True, deferred=True)
    window = OPTIONS[combination][2].get("accumulate_grad_batches", 3)
    settings = {"accumulate_grad_batches": window, "log_every_n_steps": 1, "seed": 3, "max_steps": 4}
    single = WAYS[SINGLE].trainer(callbacks=[recorder], **settings)
    single.fit(module, DataLoader(module.data(40), WAYS[SINGLE].micro_batch))
    for of_rank in with_options:
        assert of_rank[combination] == pytest.approx(recorder.losses, rel=1e-5)


class OutOfRange(GPT):
    """torch's own code raises in the forward, while the weights around the blocks are gathered."""

    def loss(self, batch: Any) -> torch.Tensor:
        assert self.net is not None
        return self.net.tokens(batch[0] + 1000).sum()


def look_up_what_is_not_there() -> None:
    module = OutOfRange()
    WAYS["FSDP x2"].trainer(max_steps=1).fit(module, DataLoader(module.data(8), 4))


def test_an_error_of_torch_in_a_forward_is_reported_as_it_is() -> None:
    with pytest.raises(AssertionError, match="IndexError: index out of range") as ended:
        run_distributed(look_up_what_is_not_there, 2, timeout=90.0)
    assert "were replaced" not in str(ended.value)


class Hooked(Callback):
    """Count the calls of FSDP2's hooks on the module of a run."""

    calls = 0

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        state = module._wrapper._get_fsdp_state()  # type: ignore[union-attr, operator]
        state._pre_forward_hook_handle.hooks_dict_ref()[-1] = self.count

    def count(self, module: nn.Module, *inputs: Any) -> None:
        hooks = module._forward_pre_hooks
        self.calls += any(getattr(hook, "__name__", "") == "_pre_forward" for hook in hooks.values())


def gather_in_a_window() -> int:
    module, hooked = GPT(), Hooked()
    WAYS["PP x2"].trainer(max_steps=1, accumulate_grad_batches=4, callbacks=[hooked]).fit(
        module, DataLoader(module.data(8), 2)
    )
    return hooked.calls


def test_a_stage_gathers_in_the_first_and_the_last_micro_batch_of_a_window() -> None:
    assert run_distributed(gather_in_a_window, 2, timeout=90.0) == [2, 2]


class Halved(GPT):
    """A weight changes between two micro-batches of one window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                next(p for p in self.parameters() if not p.isnan().any()).mul_(0.5)


def change_within_a_window() -> None:
    module = Halved()
    WAYS["PP x2"].trainer(max_steps=1, accumulate_grad_batches=4).fit(module, DataLoader(module.data(8), 2))


def test_a_weight_that_changes_while_a_stage_keeps_it_gathered_is_reported() -> None:
    with pytest.raises(
        AssertionError, match=r"changed within a step, while gathered .* change it in on_train_step_end"
    ):
        run_distributed(change_within_a_window, 2, timeout=90.0)


def test_whole_numbers_between_stages_are_refused() -> None:
    with raises_recorded(ConfigError):
        Neighbour(None, None, 1).send(torch.zeros(1, dtype=torch.int64))  # type: ignore[arg-type]


def fit_several_times(way: str) -> tuple[list[int], list[list[float]]]:
    """Return the number of process groups after each run, and the losses of each."""
    groups, losses = [], []
    for _ in range(3):
        recorder = StepLosses()
        torch.manual_seed(3)
        module = GPT(tied=True)
        settings = {"max_steps": 3, "accumulate_grad_batches": 3, "log_every_n_steps": 1, "seed": 3}
        trainer = WAYS[way].trainer(**settings, callbacks=recorder)
        trainer.fit(module, DataLoader(module.data(81), WAYS[way].micro_batch))
        losses.append(recorder.losses)
        groups.append(len(torch.distributed.distributed_c10d._world.pg_map))
    return groups, losses


@pytest.mark.parametrize("way", TWO)
def test_runs_one_after_the_other_share_process_groups(way: str) -> None:
    for groups, losses in run_distributed(fit_several_times, 2, way):
        assert len(set(groups)) == 1
        assert all(one == losses[0] for one in losses)


class Drawing(Planned):
    """Draws numbers of each generator around the blocks, and before the first batch."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.drawn: list[list[float]] = []

    def draw(self) -> None:
        self.drawn.append([float(torch.rand(())), float(np.random.rand()), random.random()])

    def on_fit_start(self) -> None:
        self.draw()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.draw()
        return super().training_step([dropout(batch[0], 0.5)], batch_idx)


def draw_numbers(seeds: bool, root: str) -> dict[str, tuple[list[list[float]], ...]]:
    """Return the numbers of runs whose processes begin with other states of their generators, and of their resumes."""
    found = {}
    for way in TWO:
        if seeds:
            seed_everything(5)
        else:
            for seed in (torch.manual_seed, np.random.seed, random.seed):
                seed(dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]))  # type: ignore[operator]
        drawn = []
        for steps in (1, 3):
            module, saved = Drawing(Attending(), Attending()), ModelCheckpoint(save_last=True, every_n_train_steps=1)
            settings = {"default_root_dir": f"{root}/{way}", "enable_checkpointing": True, "max_steps": steps}
            trainer = WAYS[way].trainer(callbacks=saved, **settings)
            if steps == 3 and not seeds:
                torch.manual_seed(10 + trainer.global_rank)
            data = TensorDataset(torch.randn(24, 8, 8, generator=torch.Generator().manual_seed(1)))
            trainer.fit(module, DataLoader(data, 8), ckpt_path="last" if steps == 3 else None)
            drawn.append(module.drawn)
        found[way] = (*drawn,)
    return found


@pytest.mark.parametrize("seeds", [False, True], ids=["without a seed", "with seed_everything"])
def test_the_processes_of_one_model_draw_the_same_numbers(seeds: bool, tmp_path: Path) -> None:
    first, second = run_distributed(draw_numbers, 2, seeds, str(tmp_path))
    for way in TWO:
        assert first[way] == second[way]
        unbroken, resumed = first[way]
        assert len(unbroken) == 2
        assert len(resumed) == 3
        assert resumed[1:] != unbroken[1:]


def leave_a_window() -> list[bool]:
    """Return, for three strategies one after the other, whether each has the first one's mesh; the second leaves."""
    meshes = []
    for leaves in (False, True, False):
        strategy, module = FSDPStrategy(**PP), Small(Attending(), Attending())
        strategy.setup_environment("cpu", PRECISIONS["32-true"])
        meshes.append(strategy._mesh)
        if leaves:
            strategy.setup_module(module, for_training=True)
            strategy.call_step("training_step", [torch.ones(4, 8, 8)], 0)  # the first stage waits for a gradient
        strategy.teardown()
    return [mesh is meshes[0] for mesh in meshes]


def test_all_processes_make_new_groups_after_a_window_that_one_has_left() -> None:
    assert run_distributed(leave_a_window, 2, timeout=90.0) == [[True, True, False]] * 2
