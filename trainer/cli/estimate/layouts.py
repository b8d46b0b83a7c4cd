"""The memory layouts of the strategies, read from their options."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from trainer.config.plug_names import strategies
from trainer.model.memory import StatePartitioning

if TYPE_CHECKING:
    from trainer.strategy import Strategy

VARIANTS: tuple[dict[str, Any], ...] = (
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "HYBRID_SHARD"},
    {"cpu_offload": True},
)
"""Options that get a row of their own, for every strategy that takes them."""


SPLITS = ("tensor", "context", "pipeline", "expert")
"""Ways to split one model over processes: the attributes of a strategy's `layout`."""


def layout_of(strategy: Strategy) -> StatePartitioning:
    """Return what a strategy shards and offloads, by its attributes of the names below.

    By default nothing is offloaded, and everything is sharded if the state is, or if there is a choice of blocks.
    """
    options = vars(strategy)
    shards = strategy.shards_state or "auto_wrap_policy" in options
    sharding, mesh = options.get("sharding_strategy"), options.get("device_mesh")
    reshard, cpu_offload = options.get("reshard_after_forward"), bool(options.get("cpu_offload"))
    parts = options.get("layout")
    degrees = {} if parts is None else {name: getattr(parts, name) for name in SPLITS}
    return StatePartitioning(
        stage=options.get("stage", 3 if shards else 0),
        master_weights="master_weights" in options,
        by_machine=sharding == "HYBRID_SHARD",
        shards=mesh[1] if mesh else None,
        keep_gathered=reshard is False
        or (reshard is None and (sharding == "SHARD_GRAD_OP" or degrees.get("pipeline", 1) > 1)),
        offload_weights=cpu_offload or options.get("offload_parameters") in ("cpu", "nvme"),
        offload_optimizer=cpu_offload or options.get("offload_optimizer") in ("cpu", "nvme"),
        **degrees,
    )


def planned_devices(arguments: Mapping[str, Any]) -> int | None:
    """Return the processes of a machine that arguments of a Trainer ask for; None where this machine would decide."""
    devices = arguments.get("devices")
    devices = len(devices) if isinstance(devices, list) else devices
    return devices if isinstance(devices, int) and devices > 0 else None


def planned_window(arguments: Mapping[str, Any]) -> int:
    """Return the micro-batches of a step by a Trainer's arguments; 1 for "auto", which a run finds out."""
    window = arguments.get("accumulate_grad_batches", 1)
    return window if isinstance(window, int) else 1


def label_words() -> list[str]:
    """Return the words of which labels of rows are made, without importing torch."""
    options = [value if isinstance(value, str) else name for one in VARIANTS for name, value in one.items()]
    return [*strategies(), *options]


def strategy_rows() -> dict[str, StatePartitioning]:
    """Return the layouts of all strategies; the label of a layout names every strategy that has it."""
    from trainer.strategy import available_strategies

    names: dict[StatePartitioning, list[str]] = {}
    for name, kind in sorted(available_strategies().items()):
        for options in ({}, *VARIANTS):
            if options.keys() <= signature(kind).parameters.keys():
                words = [value if isinstance(value, str) else option for option, value in options.items()]
                names.setdefault(layout_of(kind(**options)), []).append(" ".join([name, *words]))
    return {", ".join(several): layout for layout, several in names.items()}
