"""The memory estimate agrees with published tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.cli.estimate.layouts import layout_of, strategy_rows
from trainer.cli.estimate.module import probe
from trainer.model.memory import (
    ADAMW,
    DtypeSizes,
    Layout,
    Memory,
    ModelSize,
    OptimizerStates,
    Setup,
    Transformer,
    Weight,
    block_activations,
    estimate_memory,
    number_sizes,
)
from trainer.precision import PRECISIONS
from trainer.strategies import STRATEGIES
from trainer.strategies.fsdp.strategy import FSDPStrategy
from trainer.strategy import Strategy

GB = 10**9


def table(elements: int, processes: int, precision: str, buffers: int = 0, **more: Any) -> dict[str, Memory]:
    """Return the memory by strategy."""
    setup = Setup(processes, number_sizes(PRECISIONS[precision]), **more)
    size = ModelSize([Weight(elements, elements)], buffers=buffers)
    rows = {label: estimate_memory(layout, size, setup) for label, layout in strategy_rows().items()}
    return {name: memory for label, memory in rows.items() for name in label.split(", ")}


# -- published tables --------------------------------------------------------------------------------------------------


def zero_table(elements: int, processes: int) -> list[Memory]:
    """Return mixed-precision Adam without ZeRO and with stages 1, 2 and 3: 2, 2, 4 and 8 bytes for each parameter."""
    size = ModelSize([Weight(elements, elements)], states=OptimizerStates("Adam", 2))
    setup = Setup(processes, DtypeSizes(4, 2))
    return [estimate_memory(Layout(stage, master_weights=True), size, setup) for stage in range(4)]


def test_the_table_of_tutorials_and_the_master_weights_that_it_forgets() -> None:
    """7 billion parameters on 4 GPUs: 84, 42, 31.5 and 21 GB in tutorials, without the master weights."""
    columns = zero_table(7 * GB, 4)
    assert [m.weights / GB for m in columns] == [14, 14, 14, 3.5]
    assert [m.gradients / GB for m in columns] == [14, 14, 3.5, 3.5]
    assert [m.optimizer / GB for m in columns] == [56, 14, 14, 14]
    assert [(m.device - m.master_weights) / GB for m in columns] == [84, 42, 31.5, 21]
    assert [m.device / GB for m in columns] == [112, 49, 38.5, 28]


def test_figure_1_of_the_zero_paper() -> None:
    """7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB (arXiv:1910.02054, figure 1)."""
    assert [round(m.device / GB, 1) for m in zero_table(7_500_000_000, 64)] == [120, 31.4, 16.6, 1.9]


def test_activations_of_a_layer_are_those_of_the_megatron_paper() -> None:
    """34sbh with fp16 and dropout (arXiv:2205.05198, table 2, without the scores)."""
    s, b, h = 2048, 4, 6144
    half = Setup(1, DtypeSizes(2, 2))
    for dropout in (True, False):
        model = Transformer(h, s, b, 48, 48, h // 48, 4 * h, dropout=dropout)
        assert block_activations(model, Layout(), half) == (34 if dropout else 32) * s * b * h


# -- precisions, strategies, optimizers --------------------------------------------------------------------------------


def test_sizes_of_numbers() -> None:
    sizes = {name: number_sizes(precision) for name, precision in PRECISIONS.items()}
    assert sizes["32-true"] == DtypeSizes(4, 4)
    assert sizes["bf16-mixed"] == DtypeSizes(4, 2)
    assert sizes["16-true"] == DtypeSizes(2, 2)


def test_every_strategy_has_a_row() -> None:
    offload = {"offload_optimizer": True, "offload_weights": True}
    rows = strategy_rows()
    assert rows == {
        "ddp, single_device, xla": Layout(),
        "deepspeed, deepspeed_stage_2": Layout(2, master_weights=True),
        "deepspeed_stage_1": Layout(1, master_weights=True),
        "deepspeed_stage_2_offload": Layout(2, master_weights=True, offload_optimizer=True),
        "deepspeed_stage_3": Layout(3, master_weights=True),
        "deepspeed_stage_3_offload": Layout(3, master_weights=True, **offload),
        "fsdp, xla_fsdp": Layout(3),
        "fsdp SHARD_GRAD_OP": Layout(3, keep_gathered=True),
        "fsdp HYBRID_SHARD": Layout(3, by_machine=True),
        "fsdp cpu_offload": Layout(3, **offload),
    }
    assert set(STRATEGIES) <= set(", ".join(rows).split(", "))


def test_the_layout_of_options_and_of_a_strategy_of_the_user() -> None:
    assert layout_of(FSDPStrategy("HYBRID_SHARD", device_mesh=(4, 2))) == Layout(3, by_machine=True, readers=2)
    assert layout_of(FSDPStrategy(reshard_after_forward=False)) == Layout(3, keep_gathered=True)
    assert layout_of(FSDPStrategy("SHARD_GRAD_OP", reshard_after_forward=True)) == Layout(3)

    class Own(Strategy):
        shards_state = True

    assert (layout_of(Strategy()), layout_of(Own())) == (Layout(), Layout(3))


@pytest.mark.parametrize(
    ("name", "per_element", "per_tensor"),
    [("AdamW", 2, 4), ("NAdam", 2, 8), ("Adagrad", 1, 4), ("RMSprop", 1, 4), ("SGD", 0, 0), ("Muon", 1, 0)],
)
def test_the_states_of_torchs_optimizers(name: str, per_element: float, per_tensor: int) -> None:
    found = probe(vars(torch.optim)[name]([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1))
    assert found == OptimizerStates(name, per_element, per_tensor)


def test_adamw_is_assumed_with_the_states_that_it_has() -> None:
    assert probe(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))])) == ADAMW


def test_options_of_an_optimizer_count() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    assert probe(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) == OptimizerStates("SGD", 1)
    assert probe(torch.optim.AdamW(parameters, amsgrad=True)).per_element == 3


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_every_part_is_sharded_as_the_strategy_shards_it() -> None:
    rows = table(8000, 8, "bf16-mixed")
    parts = {label: (m.weights, m.gradients, m.master_weights, m.optimizer) for label, m in rows.items()}
    step = 4
    assert parts["ddp"] == (32000, 32000, 0, 64000 + step)
    assert parts["fsdp"] == (4000, 4000, 0, 8000 + step)
    assert parts["deepspeed_stage_1"] == (16000, 16000, 4000, 8000 + step)
    assert parts["deepspeed_stage_2"] == (16000, 2000, 4000, 8000 + step)
    assert parts["deepspeed_stage_3"] == (2000, 2000, 4000, 8000 + step)


def test_the_hybrid_layout_shards_within_a_machine() -> None:
    rows = table(8000, 8, "32-true", per_machine=4)
    assert rows["fsdp HYBRID_SHARD"].weights == 8000
    assert rows["fsdp"].weights == 4000


def test_what_is_offloaded_counts_on_the_host() -> None:
    rows = table(8000, 8, "bf16-mixed", buffers=100)
    offloaded, kept = rows["fsdp cpu_offload"], rows["fsdp"]
    assert offloaded.device == 0
    assert offloaded.host == kept.device - 100
    zero = rows["deepspeed_stage_2_offload"]
    assert zero.device == zero.weights + zero.gradients
    assert zero.host == zero.master_weights + zero.optimizer + 4000


def test_frozen_weights_have_no_gradient_and_idle_ones_no_state() -> None:
    weights = [Weight(100, 10), Weight(1000, 10, trainable=False, optimized=False), Weight(10, 10, optimized=False)]
    memory = estimate_memory(Layout(), ModelSize(weights), Setup(1, DtypeSizes(4, 4)))
    assert (memory.weights, memory.gradients, memory.optimizer) == (4440, 440, 804)


def test_rows_that_do_not_divide_are_filled_up() -> None:
    memory = estimate_memory(Layout(3), ModelSize([Weight(15, 3)]), Setup(2, DtypeSizes(4, 4)))
    assert memory.weights == 4 * 2 * 5


def test_a_window_keeps_full_gradients_with_fsdp() -> None:
    one, several = table(8000, 8, "bf16-mixed"), table(8000, 8, "bf16-mixed", window=4)
    fsdp = "fsdp"
    assert several[fsdp].temporary - one[fsdp].temporary == 4 * 8000
    assert several["deepspeed_stage_2"] == one["deepspeed_stage_2"]
