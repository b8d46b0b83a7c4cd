"""Does a test fail when a line is wrong? `python -m tests.mutants` changes one line at a time, in a copy.

Each mutant of the list below is run with the tests that find it and no others. `python -m tests.mutants draw 7 23`
draws 23 more with the seed 7 and prints them in the list's form, without their tests. With `--tests "..."` it runs each
of them with those pytest arguments and says which ones live.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRAWN_FROM = (
    "trainer/trainer.py",
    "trainer/loop/*.py",
    "trainer/guards/*.py",
    "trainer/metrics/*.py",
    "trainer/engine/*.py",
    "trainer/checkpoint/*.py",
    "strategies/*.py",
    "strategies/fsdp/*.py",
    "strategies/parallel/*.py",
    "strategies/deepspeed/*.py",
)
TIERS = {"quick": "not slow and not long", "test": "not long"}
FOUND, LIVES, WITHOUT_A_TEST = "found", "LIVES", "no such test, or an error before it"


@dataclass(frozen=True)
class Mutant:
    """One changed line: the first line of `place` (a file, `::` and the function in it) that reads `before`."""

    place: str
    before: str
    after: str
    tests: str = ""
    """Arguments of pytest that select what finds it."""
    tier: str = "quick"
    """The tier whose tests these are: "quick", or "test" for those that `make test` runs beside them."""

    @property
    def selection(self) -> str:
        """The arguments of pytest that select what finds it, in its tier alone."""
        return f"{self.tests} -m '{TIERS[self.tier]}'"

    def lines(self, root: Path) -> tuple[Path, list[str], int]:
        """Return the file, its lines, and the index of the line to change.

        Raises:
            LookupError: There is no such line any more.
        """
        name, _, function = self.place.partition("::")
        lines = (root / name).read_text().splitlines(keepends=True)
        first, last = _functions(ast.parse("".join(lines)))[function]
        for index in range(first - 1, last):
            if lines[index].strip() == self.before:
                return root / name, lines, index
        raise LookupError(f"{self.place} has no line {self.before!r}: give this mutant the line that stands there now")

    def run(self, root: Path, tests: str) -> str:
        """Change the line, run the tests, and put the line back."""
        path, lines, index = self.lines(root)
        indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        path.write_text("".join([*lines[:index], f"{indent}{self.after}\n", *lines[index + 1 :]]))
        try:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
            ended = subprocess.run(command, cwd=root, env=_environment(root), capture_output=True, text=True)
        finally:
            path.write_text("".join(lines))
        return {0: LIVES, 1: FOUND}.get(ended.returncode, WITHOUT_A_TEST)


MUTANTS = (
    # Seven that a review once found to be held by few tests, or by none near them.
    Mutant(
        "trainer/loop/run.py::Epoch.is_last_batch",
        "return loader is not None and loader.length is not None and batch >= loader.length",
        "return False",
        "tests/loop/test_step_numbers.py::test_the_last_batches_are_those_of_the_last_window",
    ),
    Mutant(
        "trainer/guards/skipped_batches.py::SkippedBatches.end_window",
        "parameter.grad /= 1 - share",
        "pass",
        "tests/loop/test_step_numbers.py::test_a_step_with_a_skipped_batch_is_the_mean_of_the_others",
    ),
    Mutant(
        "trainer/engine/loader.py::EngineLoader._iterate",
        "self.weight = batch.share * engine.strategy.processes.readers / batch.total if batch.total else 0.0",
        "self.weight = 1.0",
        "tests/loop/test_step_numbers.py::test_weighted_means_of_two_processes_are_the_mean_of_the_samples",
    ),
    Mutant(
        "trainer/loop/run.py::Epoch.validation_due",
        "batch += self._progress.batches_before",
        "pass",
        "tests/loop/test_step_numbers.py::test_batches_between_validations_are_counted_over_epochs",
    ),
    Mutant(
        "trainer/trainer.py::Trainer._step_waiting_schedulers",
        'self._step_schedulers(run, "step", run.progress.step, on_plateau=True)',
        "pass",
        "tests/loop/test_step_numbers.py::test_a_scheduler_that_waits_for_validations_steps_after_each",
    ),
    Mutant(
        "trainer/metrics/metric_log.py::MetricLog._read_entries",
        "self.train.entries[name].superseded = self.window",
        "pass",
        "tests/loop/test_step_numbers.py::test_a_value_of_a_validation_replaces_one_by_step_that_waits_for_its_flush",
    ),
    Mutant(
        "trainer/strategy.py::_full_in_place",
        "strategy.processes.broadcast([*module.parameters(), *(b for b in module.buffers() if b.numel())])",
        "pass",
        "tests/loop/test_step_numbers.py::test_weights_that_are_written_in_a_hook_are_those_of_rank_0",
    ),
    # The next 23 are what `draw 7 24` gave, without the one in `EQUIVALENT`.
    Mutant(
        "trainer/checkpoint/base_weights.py::_sum",
        "total += int(bits.sum(dtype=torch.int64))",
        "pass",
        "tests/checkpoint/test_base_weights.py",
    ),
    Mutant(
        "trainer/checkpoint/kept.py::KeptCheckpoints.__init__",
        "self._owner = os.urandom(8).hex()",
        "pass",
        "tests/callbacks/test_checkpoint.py::test_without_monitor_the_newest_are_kept",
    ),
    Mutant(
        "strategies/deepspeed/partitioning.py::partition_module",
        "if held is tensor:",
        "if (not (held is tensor)):",
        "tests/strategies/test_init_device_runs.py::test_the_values_are_those_of_one_process -k ZeRO",
    ),
    Mutant(
        "strategies/distributed.py::check_backends",
        "dist.destroy_process_group()",
        "pass",
        "tests/strategies/test_average_gradients.py::test_a_group_without_a_backend_for_gpus_is_refused_or_made_anew",
    ),
    Mutant(
        "trainer/guards/direct_backward.py::refusing_direct_backward",
        "if marks_of_gradients(parameters) != before:",
        "if (not (marks_of_gradients(parameters) != before)):",
        "tests/loop/test_manual_precision.py::test_an_overflow_in_a_step_that_the_module_leaves_out_lowers_the_scale",
    ),
    Mutant(
        "trainer/checkpoint/shards.py::read_when_used",
        "tensor._stored = value",
        "pass",
        "tests/strategies/test_load_hooks.py::test_the_hooks_see_full_weights",
        tier="test",
    ),
    Mutant(
        "strategies/deepspeed/config.py::CompletedConfig.__init__",
        'self._check_schedule(self.config.pop("scheduler", None))',
        "pass",
        "tests/strategies/test_deepspeed_config.py::test_a_schedule_that_would_have_no_effect_is_reported",
    ),
    Mutant(
        "trainer/checkpoint/pretrained.py::weights_for",
        "not_loaded = [words for name, words in lacks.items() if plain[name] is not None] + others",
        "not_loaded = [words for name, words in lacks.items() if (not (plain[name] is not None))] + others",
        "tests/checkpoint/test_pretrained.py::test_what_is_not_loaded_is_said",
        tier="test",
    ),
    Mutant(
        "strategies/deepspeed/master_weights.py::_weight",
        "if value in master_weights.pieces:",
        "if (not (value in master_weights.pieces)):",
        "tests/strategies/test_deepspeed_state.py::test_the_weights_of_a_state_are_master_weights",
        tier="test",
    ),
    Mutant(
        "strategies/deepspeed/strategy.py::DeepSpeedStrategy._start",
        "elif not self._packs_at_once:",
        "elif (not (not self._packs_at_once)):",
        "tests/strategies/test_call_order.py::test_another_order_on_one_process_is_reported -k ZeRO-1",
        tier="test",
    ),
    Mutant(
        "trainer/checkpoint/optimizer_state.py::_keep_groups",
        "optimizer.param_groups = kept",
        "pass",
        "tests/strategies/test_foreign_optimizers.py::test_a_resumed_run_has_the_same_bits -k single",
    ),
    Mutant(
        "trainer/metrics/reductions.py::Accumulator.local_value",
        "return value / (self.weight_on_host + (0.0 if self.weight_on_device is None else self.weight_on_device))",
        "return value / (self.weight_on_host + (0.0 if (not (self.weight_on_device is None)) else "
        "self.weight_on_device))",
        "tests/metrics/test_reductions.py::test_a_mean_so_far_is_over_all_weights",
    ),
    Mutant(
        "trainer/checkpoint/flat_slice.py::slice_of_grid",
        "if any(len(indices) == 0 for indices in along):",
        "if any((not (len(indices) == 0)) for indices in along):",
        "tests/strategies/test_local_slice.py",
    ),
    Mutant(
        "trainer/loop/step.py::Step._call_optimizer_step",
        "if not given.stepped:",
        "if (not (not given.stepped)):",
        "tests/loop/test_manual_precision.py::test_an_overflow_in_a_step_that_the_module_leaves_out_lowers_the_scale",
    ),
    Mutant(
        "strategies/deepspeed/empty_parameters.py::RefusingEmptyParameters._check",
        "if status is None or status is not type(status).NOT_AVAILABLE or func in _ALLOWED or not from_user_code():",
        "if (not (status is None)) or status is not type(status).NOT_AVAILABLE or func in _ALLOWED "
        "or not from_user_code():",
        "tests/strategies/test_deepspeed_problems.py::test_nothing_is_computed_with_an_empty_parameter_alone",
    ),
    Mutant(
        "strategies/deepspeed/config_checks.py::without_auto",
        "return {key: without_auto(part) for key, part in value.items() if part != AUTO}",
        "return {key: without_auto(part) for key, part in value.items() if (not (part != AUTO))}",
        "tests/strategies/test_deepspeed_config.py::test_a_json_is_taken_unmodified_and_all_its_keys_pass_through",
    ),
    Mutant(
        "strategies/fsdp/gradients.py::Gradients._end_of_graph",
        "self._reached = True",
        "pass",
        "tests/strategies/test_fsdp_manual.py::test_a_backward_through_two_models_reduces_the_gradients_of_both",
    ),
    Mutant(
        "trainer/data/media_state.py::media_of",
        'require(state, {"kind": tuple(_STATES)}, "a medium")',
        "pass",
        "tests/metrics/test_media.py::test_the_state_of_a_medium_is_checked",
    ),
    Mutant(
        "trainer/engine/engine.py::Engine.setup_dataloaders",
        'self._require_entered("setup_dataloaders")',
        "pass",
        "tests/test_engine.py::test_loaders_are_set_up_within_the_block",
    ),
    Mutant(
        "trainer/guards/bad_steps.py::BadSteps.watch",
        "good = torch.isfinite(loss) & (loss <= self._limit)",
        "good = torch.isfinite(loss) & ((not (loss <= self._limit)))",
        "tests/loop/test_step_numbers.py::test_a_loss_that_is_infinite_or_a_spike_changes_no_weight",
    ),
    Mutant(
        "trainer/engine/model.py::Adapter.training_step",
        'return (self.model if method == "forward" else getattr(self.model, method))(*args, **options)',
        'return (self.model if (not (method == "forward")) else getattr(self.model, method))(*args, **options)',
        "tests/test_engine.py::test_a_strategy_calls_the_forward_or_the_method_that_was_called",
    ),
    Mutant(
        "trainer/loop/evaluation.py::_publish",
        "if not log_results:",
        "if (not (not log_results)):",
        "tests/callbacks/test_csv_logger.py::test_evaluation_after_training_adds_to_the_file",
    ),
    Mutant(
        "trainer/guards/direct_backward.py::refusing_direct_backward",
        "parameters = parameters_of(optimizers)",
        "pass",
        "tests/loop/test_manual_precision.py::test_an_overflow_in_a_step_that_the_module_leaves_out_lowers_the_scale",
    ),
)

EQUIVALENT = (
    (
        Mutant(
            "trainer/guards/bad_steps.py::KeptBuffers.keep",
            "self._kept[place] = (buffer, buffer._version, kept[2])",
            "pass",
        ),
        "with an older version, a buffer that has not changed is copied again, and gets the values that it has",
    ),
)
"""Drawn mutants that compute the same, and the reasons."""


def _environment(root: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def _functions(tree: ast.Module) -> dict[str, tuple[int, int]]:
    """Return the lines of each function of a file by its qualified name, and of the whole file under ""."""
    found = {"": (1, max((node.end_lineno or 1) for node in tree.body))}

    def visit(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{above}{child.name}"
                found[name] = (child.lineno, child.end_lineno or child.lineno)
                visit(child, f"{name}.")

    visit(tree, "")
    return found


# -- what can be changed in a line -------------------------------------------------------------------------------------


def changes(source: str, name: str) -> Iterator[Mutant]:
    """Yield the mutants of a file: conditions negated, whole numbers one larger, statements dropped."""
    lines, tree = source.splitlines(), ast.parse(source)
    functions = sorted(_functions(tree).items(), key=lambda item: (item[1][1] - item[1][0], -len(item[0])))
    for node in filter(_is_on_one_line, ast.walk(tree)):
        number = node.lineno  # type: ignore[attr-defined]
        place = next(function for function, (first, last) in functions if first <= number <= last)
        changed = _changed(node, lines[number - 1])
        if place and changed is not None:
            yield Mutant(f"{name}::{place}", lines[number - 1].strip(), changed.strip())


def _is_on_one_line(node: ast.AST) -> bool:
    return getattr(node, "lineno", 0) == getattr(node, "end_lineno", None)


def _changed(node: ast.AST, line: str) -> str | None:
    """Return the line with a changed node, or None for a node of which there is nothing to change."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)):
        return "pass"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _replaced(line, node, str(node.value + 1))
    if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        return _replaced(line, node, f"(not ({_text(line, node)}))")
    return None


def _text(line: str, node: ast.expr) -> str:
    return line.encode()[node.col_offset : node.end_col_offset].decode()


def _replaced(line: str, node: ast.expr, text: str) -> str:
    encoded = line.encode()
    return (encoded[: node.col_offset] + text.encode() + encoded[node.end_col_offset :]).decode()


def drawn(root: Path, seed: int, number: int) -> list[Mutant]:
    """Draw mutants: each file of `DRAWN_FROM` as often as the others, each of its changes likewise."""
    generator = random.Random(seed)
    files = sorted({path for pattern in DRAWN_FROM for path in root.glob(pattern)})
    chosen = dict[Mutant, None]()
    while len(chosen) < number:
        path = generator.choice(files)
        if found := list(changes(path.read_text(), str(path.relative_to(root)))):
            chosen[generator.choice(found)] = None
    return list(chosen)


# -- running them ------------------------------------------------------------------------------------------------------


def copied(into: Path) -> Path:
    """Copy what git tracks, links as links."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name, follow_symlinks=False)
    return into


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("what", nargs="*", help="draw SEED NUMBER; without it the mutants of the list")
    parser.add_argument("--tests", help="arguments of pytest instead of each mutant's own tests")
    options = parser.parse_args(argv)
    mutants = list(MUTANTS)
    if options.what:
        mutants = drawn(ROOT, int(options.what[1]), int(options.what[2]))
        if options.tests is None:
            print(*mutants, sep="\n")
            return 0
    with tempfile.TemporaryDirectory() as folder:
        return _report(mutants, copied(Path(folder)), options.tests)


def _report(mutants: list[Mutant], root: Path, tests: str | None) -> int:
    """Run the mutants, say of each what became of it, and return 1 if one was not found."""
    results, began = list[str](), time.monotonic()
    for mutant in mutants:
        results.append(mutant.run(root, tests or mutant.selection))
        print(f"{results[-1]}: {mutant.place}: {mutant.before}  ->  {mutant.after}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{results.count(FOUND)} of {len(results)} were found, in {minutes:.1f} minutes")
    return int(results.count(FOUND) < len(results))


if __name__ == "__main__":
    sys.exit(main())
