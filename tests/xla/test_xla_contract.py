"""XLA strategies pass the contract suite of the strategy table on four devices."""

from __future__ import annotations

import pytest

from tests import test_contract as contract
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
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_USE_SPMD", raising=False)  # The new processes switch it on themselves.
        return contract.run_everything(request.param, tmp_path_factory.mktemp(request.param), TIMEOUT)


def test_every_test_of_the_suite_runs_here() -> None:
    with_runs = {
        name
        for name, function in vars(contract).items()
        if name.startswith("test_") and "runs" in function.__code__.co_varnames[: function.__code__.co_argcount]
    }
    assert with_runs <= set(globals())
