"""The ordinary strategies pass the contract suite of the strategy table on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from tests import test_contract as contract
from tests.helpers.emulated import device as emulated
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

pytestmark = pytest.mark.timeout(900)  # the first test compiles the device and starts all processes
TIMEOUT = 240.0


def first_process(strategy: str, folder: str, breaks: bool) -> dict[str, Any]:
    emulated.install()
    results = contract.first_process(strategy, folder, breaks)
    counts = emulated.counts()
    # Neither is an error by itself: a pickle names the device, and memory is reused while another stream reads it.
    assert counts["pickled"] == counts["unsafe frees"] == 0, counts
    return results


def second_process(strategy: str, folder: str) -> dict[str, Any]:
    emulated.install()
    return contract.second_process(strategy, folder)


@pytest.fixture(scope="module", params=["single_device", "ddp"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Everything:
    emulated.skip_if_missing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "first_process", first_process)
        patch.setattr(contract, "second_process", second_process)
        breaks = contract.breaks_are_tested(request)
        return contract.run_everything(request.param, tmp_path_factory.mktemp(request.param), TIMEOUT, breaks)
