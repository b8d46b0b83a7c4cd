"""The cost model of layouts agrees with real steps: each collective with its bytes, and the memory of each process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.counted_collectives import CountCollectives, Counted
from tests.helpers.decoder import Decoder
from tests.helpers.processes import run_distributed
from tests.tiers import selected
from trainer import Callback, Trainer, TrainModule
from trainer.model.memory import number_sizes
from trainer.model.parallel_cost import (
    Architecture,
    Layout,
    Work,
    collectives,
    process_memory,
    stages_of,
)
from trainer.precision import PRECISIONS
from trainer.strategies import FSDPStrategy

LLAMA = Architecture(layers=4, hidden=64, heads=4, vocabulary=96, kv_heads=2, head_dim=16, intermediate=160, gated=True)
GPT = Architecture(
    layers=3, hidden=64, heads=4, vocabulary=96, kv_heads=4, head_dim=16, intermediate=256, gated=False, tied=True
)
MIXTRAL = replace(LLAMA, layers=3, intermediate=96, experts=4, experts_per_token=2)
THREE = replace(MIXTRAL, experts=3, experts_per_token=1)
"""Experts that two processes cannot share evenly: their shards are padded."""
QWEN = replace(MIXTRAL, shared=64)


@dataclass(frozen=True)
class Run:
    """A layout on real processes, and what it trains."""

    layout: Layout
    model: Architecture = LLAMA
    window: int = 2
    checkpointing: bool = False
    accumulate_unsharded: bool = True
    keys: bool = False
    precision: str = "32-true"

    @property
    def work(self) -> Work:
        return Work(
            sequence=64,
            micro_batch=2,
            window=self.window,
            numbers=number_sizes(PRECISIONS[self.precision]),
            checkpointing=self.checkpointing,
            accumulate_unsharded=self.accumulate_unsharded,
            keys=self.keys,
            gathers_in_8_bits=self.precision == "fp8",
            norms_stored=False,
        )

    def trainer(self, *callbacks: Callback) -> Trainer:
        layout = self.layout
        hybrid: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (layout.replicas, layout.shards)}
        strategy = FSDPStrategy(
            tensor_parallel=layout.tensor,
            context_parallel=layout.context,
            pipeline_parallel=layout.pipeline,
            expert_parallel=layout.expert,
            context_exchange="keys" if self.keys else "auto",
            accumulate_unsharded=self.accumulate_unsharded,
            **(hybrid if layout.replicas > 1 else {}),
        )
        return Trainer(
            strategy=strategy if layout.processes > 1 else "single_device",
            devices=layout.processes,
            accelerator="cpu",
            accumulate_grad_batches=self.window,
            activation_checkpointing="auto" if self.checkpointing else None,
            gradient_clip_val=1.0,
            precision=self.precision,
            max_steps=2,
            callbacks=list(callbacks),
            **QUIET,
        )


TWO = {
    "FSDP x2": Run(Layout(shards=2)),
    "FSDP x2, communicating always": Run(Layout(shards=2), accumulate_unsharded=False),
    "TP x2": Run(Layout(tensor=2)),
    "TP x2, checkpointing": Run(Layout(tensor=2), checkpointing=True),
    "TP x2, GPT": Run(Layout(tensor=2), GPT),
    "CP x2, heads": Run(Layout(context=2)),
    "CP x2, checkpointing": Run(Layout(context=2), checkpointing=True),
    "CP x2, keys": Run(Layout(context=2), keys=True),
    "PP x2": Run(Layout(pipeline=2), window=3),
    "PP x2, tied": Run(Layout(pipeline=2), GPT, window=3),
    "PP x2, checkpointing": Run(Layout(pipeline=2), window=3, checkpointing=True),
    "FSDP x2, bf16-mixed": Run(Layout(shards=2), precision="bf16-mixed"),
    "FSDP x2, bf16-true": Run(Layout(shards=2), precision="bf16-true"),
    "TP x2, bf16-mixed": Run(Layout(tensor=2), precision="bf16-mixed"),
    "CP x2, bf16-mixed": Run(Layout(context=2), precision="bf16-mixed"),
    "PP x2, bf16-mixed": Run(Layout(pipeline=2), window=3, precision="bf16-mixed"),
    "FSDP x2, fp8": Run(Layout(shards=2), precision="fp8"),
    "CP x2, fp8": Run(Layout(context=2), GPT, precision="fp8"),
    "FSDP x2, bf16-mixed, checkpointing": Run(Layout(shards=2), precision="bf16-mixed", checkpointing=True),
    "FSDP x2, mixture": Run(Layout(shards=2), MIXTRAL),
    "FSDP x2, mixture of 3": Run(Layout(shards=2), THREE),
    "TP x2, mixture": Run(Layout(tensor=2), QWEN),
    "TP x2, mixture, checkpointing": Run(Layout(tensor=2), QWEN, checkpointing=True),
    "EP x2": Run(Layout(shards=2, expert=2), MIXTRAL),
    "EP x2, checkpointing": Run(Layout(shards=2, expert=2), MIXTRAL, checkpointing=True),
    "EP x2, bf16-mixed": Run(Layout(shards=2, expert=2), MIXTRAL, precision="bf16-mixed"),
}
FOUR = {
    "HYBRID 2x2": Run(Layout(shards=2, replicas=2)),
    "TP 2 x FSDP 2": Run(Layout(shards=2, tensor=2)),
    "CP 2 x TP 2": Run(Layout(context=2, tensor=2)),
    "PP 2 x FSDP 2": Run(Layout(shards=2, pipeline=2), window=3),
    "PP 2 x TP 2": Run(Layout(pipeline=2, tensor=2), window=3),
    "PP 2 x CP 2": Run(Layout(pipeline=2, context=2), window=3),
    "FSDP 4 with EP 2": Run(Layout(shards=4, expert=2), MIXTRAL),
    "HYBRID 2x2 with EP 2": Run(Layout(shards=2, replicas=2, expert=2), MIXTRAL),
    "FSDP 2 x TP 2 with EP 2": Run(Layout(shards=2, tensor=2, expert=2), QWEN),
    "FSDP 2 x CP 2 with EP 4": Run(Layout(shards=2, context=2, expert=4), MIXTRAL),
    "PP 2 x FSDP 2, fp8": Run(Layout(shards=2, pipeline=2), window=3, precision="fp8"),
    "FSDP 2 x PP 2 with EP 2": Run(Layout(shards=2, pipeline=2, expert=2), MIXTRAL, window=3),
}
RUNS = {**TWO, **FOUR}
if find_spec("torchao") is None:
    RUNS = {name: run for name, run in RUNS.items() if "fp8" not in run.precision}


class Measure(Callback):
    """Count the collectives of the second step, and measure its memory."""

    counted: Counted
    states = activations = stage = 0

    def __init__(self, run: Run) -> None:
        self.run, self.micro_batches = run, 0
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, *args: Any) -> None:
        if trainer.global_step == 1 and not self.micro_batches:
            pipeline = vars(trainer.strategy).get("pipeline")
            self.stage = 0 if pipeline is None else pipeline.stage
            vars(trainer.strategy)["_kept_values"] = None  # what is compared in the first steps and every 64th
            self.mode = CountCollectives()
            self.mode.__enter__()

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        if trainer.global_step == 1:
            self.losses.append(float(loss.detach()))
            self.micro_batches += 1
            # As many forwards as a stage keeps, and no backward yet.
            if self.micro_batches == min(self.run.window, self.run.layout.pipeline - self.stage):
                self.activations = self.mode.allocated(module)

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Any) -> None:
        if trainer.global_step == 1:
            own = [p for p in module.parameters() if hasattr(p, "device_mesh")]
            states = [value for state in optimizer.state.values() for value in state.values()]
            local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in states]
            local += [tensor.to_local() for p in own for tensor in (p, p.grad)]  # type: ignore[operator, union-attr]
            self.states = sum(tensor.nbytes for tensor in local)

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.micro_batches and not hasattr(self, "counted"):
            self.mode.__exit__(None, None, None)
            self.counted = self.mode.counted


def module_and_data(run: Run) -> tuple[TrainModule, DataLoader[Any]]:
    torch.manual_seed(0)
    tokens = torch.randint(run.model.vocabulary, (2 * 2 * run.window * run.layout.readers, run.work.sequence + 1))
    return Decoder(run.model), DataLoader(TensorDataset(tokens), run.work.micro_batch)


def measured(names: list[str]) -> dict[str, tuple[int, Counted, int, int, list[float]]]:
    """Train each; return the stage, the collectives, the bytes of states and of activations, and the last losses."""
    found = {}
    for name in names:
        run = RUNS[name]
        measure = Measure(run)
        run.trainer(measure).fit(*module_and_data(run))
        found[name] = (measure.stage, measure.counted, measure.states, measure.activations, measure.losses)
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    names, ranks = selected(request, "name"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        for processes in (2, 4):
            together = [name for name in names if RUNS[name].layout.processes == processes]
            if together:
                several = run_distributed(measured, processes, together)
                ranks.update({name: [rank[name] for rank in several] for name in together})
    return ranks


@pytest.mark.parametrize("name", RUNS)
def test_a_step_sends_what_the_formulas_say(name: str, found: dict[str, list[Any]]) -> None:
    run = RUNS[name]
    stages = stages_of(run.model, run.layout.pipeline)
    for number, counted, *_ in found[name]:
        wanted: Counted = Counter()
        for one in collectives(run.model, run.layout, run.work, stages[number]):
            wanted[one.kind, one.bytes] += one.count
        assert dict(counted) == dict(wanted)


@pytest.mark.parametrize("name", RUNS)
def test_memory_is_within_15_percent(name: str, found: dict[str, list[Any]]) -> None:
    run = RUNS[name]
    stages = stages_of(run.model, run.layout.pipeline)
    for stage in stages:
        of_stage = [
            (states, activations) for number, _, states, activations, _ in found[name] if number == stage.number
        ]
        wanted = process_memory(run.model, run.layout, run.work, stage)
        # Of experts that cannot be shared evenly, the first processes have more.
        most = max(states for states, _ in of_stage)
        assert wanted.parameters + wanted.gradients + wanted.optimizer == pytest.approx(most, rel=0.01)
        for _, activations in of_stage:
            assert wanted.activations == pytest.approx(activations, rel=0.15)


@pytest.mark.parametrize(
    "name", [name for name in RUNS if RUNS[name].layout.readers == 1 and RUNS[name].precision == "32-true"]
)
def test_the_second_step_has_the_losses_of_one_process(name: str, found: dict[str, list[Any]]) -> None:
    run = RUNS[name]
    alone = Measure(replace(run, layout=Layout()))
    alone.run.trainer(alone).fit(*module_and_data(run))
    for number, *_, losses in found[name]:
        if number == run.layout.pipeline - 1:
            assert losses == pytest.approx(alone.losses, rel=1e-5)
