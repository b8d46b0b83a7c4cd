"""The contract suite of the strategy table on four XLA devices."""

from __future__ import annotations

import pytest

from tests import test_contract as contract
from tests.harness import run_distributed
from tests.test_contract import (  # noqa: F401
    Everything,
    test_a_break_at_any_step_changes_nothing,
    test_a_checkpoint_is_read_without_a_trainer,
    test_a_scheduler_steps_once_a_step_on_any_number_of_processes,
    test_a_stopped_run_ends_with_the_same_bits,
    test_a_stopped_run_ends_with_the_same_rows_in_its_log,
    test_backward_is_four_frames_away_from_fit,
    test_every_sample_is_seen_once_an_epoch,
    test_it_evaluates_every_sample_once,
    test_it_trains,
    test_state_dict_has_the_keys_of_the_plain_module,
    test_ten_steps_of_two_optimizers_are_ten_steps,
)

TIMEOUT = 900.0


@pytest.fixture(scope="module", params=["xla", "xla_fsdp"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Everything:
    """As in the suite itself: two starts of a process, what is resumed is resumed in a new one."""
    strategy, folder = request.param, tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("XLA_USE_SPMD", raising=False)  # The new processes switch it on themselves.
        first = run_distributed(contract.first_process, 1, strategy, str(folder), timeout=TIMEOUT)
        resumed = run_distributed(contract.second_process, 1, strategy, str(folder), timeout=TIMEOUT)
    return Everything(resumed=resumed, **{key: [rank[key] for rank in first] for key in first[0]})


def test_every_test_of_the_suite_runs_here() -> None:
    with_runs = {
        name
        for name, function in vars(contract).items()
        if name.startswith("test_") and "runs" in function.__code__.co_varnames[: function.__code__.co_argcount]
    }
    assert with_runs <= set(globals())
