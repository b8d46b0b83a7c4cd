from __future__ import annotations

import pytest

from trainer.errors import ConfigError
from trainer.runtime.environment import Environment, detect_environment

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_nothing_set_is_a_single_process() -> None:
    assert detect_environment({}) == Environment(0, 0, 1, 1, 0, 1, "single process", 0)


def test_master_address_alone_means_nothing() -> None:
    assert detect_environment({"MASTER_ADDR": "a", "MASTER_PORT": "1"}).source == "single process"


def test_torchrun() -> None:
    assert detect_environment(TORCHRUN) == Environment(5, 1, 8, 4, 1, 2, "torchrun", 2)


def test_nodes_are_counted_where_nobody_says() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = detect_environment({name: TORCHRUN[name] for name in names})
    assert (environment.node_rank, environment.num_nodes, environment.restart_count) == (1, 2, 0)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_partial_variables_are_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"but not {missing}. Start with torchrun"):
        detect_environment({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "8"}, "RANK=8 must be smaller than WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be smaller than LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE=16 must not be larger than WORLD_SIZE=8"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1' is not a whole number"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x' is not"),
        ({"RANK": "9", "LOCAL_RANK": "9"}, r"2 problems in the environment:\n  - RANK=9 .*\n  - LOCAL_RANK=9"),
    ],
)
def test_contradictions_are_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_environment({**TORCHRUN, **changed})


@pytest.mark.parametrize("zero", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_no_processes_at_all(zero: str) -> None:
    with pytest.raises(ConfigError, match=f"{zero}=0"):
        detect_environment({**TORCHRUN, zero: "0"})
