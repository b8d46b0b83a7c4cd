"""`trainer fit --dry-run`: check a training on many processes on one machine, which needs no GPU."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.cli.doctor.results import CheckResult, as_json, check_result, failed, gib, summary
from trainer.cli.options import CommandParser, config_option, positive, reports_errors
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node, entries
from trainer.errors import ConfigError, raise_problems

if TYPE_CHECKING:
    from trainer.config.loading import Recipe
    from trainer.data.loader import BatchLoader
    from trainer.distributed.process_group import SingleProcess
    from trainer.loop.run import Run
    from trainer.model.memory import Layout
    from trainer.runs.resolved_config import ResolvedConfig
    from trainer.trainer import Trainer

EXAMPLES = """\
examples:
  trainer fit --config run.yaml --dry-run --world-size 1024
  trainer fit --config run.yaml --dry-run --world-size 64 --nproc-per-node 4 --device-memory 80
  trainer fit --config run.yaml --dry-run --world-size 16 --trainer.strategy fsdp --data.batch_size 8
  trainer fit --config run.yaml --dry-run --world-size 16 --no-data       without looking at the data
"""
DEVICES = {"auto": "cuda", "gpu": "cuda"}
"""Device types by accelerator: dry runs assume a large machine, so that auto means GPUs."""


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the results. Returns the exit code: 1 when a check failed, 2 for a wrong configuration or usage."""
    results, output, findings = [], sys.stdout, Diagnostics()
    given, overrides = _parser().parse_with_overrides(arguments, findings)
    with redirect_stdout(sys.stderr):  # whatever the user's files and DeepSpeed print: stdout has only the results
        configuration, accelerator = _read(given, overrides, findings)
        per_machine = _per_machine(given, configuration)
        for result in _checks(given, configuration, accelerator, per_machine):
            results.append(result)
            if not given.json:
                print(result.line(), file=output, flush=True)
    print(as_json(results) if given.json else f"\n{summary(results)}; nothing was started, nothing written")
    return int(failed(results))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="trainer fit --dry-run",
        usage="trainer fit --config FILE [FILE ...] --dry-run [OPTIONS]",
        description="Check a training on many processes on this machine: the configuration, the split of the data,\n"
        "the strategy's layout, the memory of each process. Starts nothing and writes nothing.\n"
        "The data module's setup is called, prepare_data is not.",
        epilog=EXAMPLES,
    )
    config_option(parser, "the configuration")
    add = parser.add_argument
    add("--dry-run", action="store_true", help="start nothing")
    words = "processes on all machines (default: devices x num_nodes, if devices is a number)"
    add("--world-size", metavar="N", type=positive, help=words)
    add("--nproc-per-node", metavar="N", type=positive, help="processes on each machine (default: devices, or 8)")
    add("--device-memory", metavar="GIB", type=float, help="of one device: fail if the training needs more")
    add("--no-data", action="store_true", help="do not set up the data")
    add("--json", action="store_true", help="print JSON")
    return parser


def _read(given: argparse.Namespace, overrides: list[tuple[str, Node]], findings: Diagnostics) -> tuple[Recipe, str]:
    """Return the checked configuration, and its accelerator, which this machine need not have."""
    given.changes = [f"--{name}={json.dumps(node.plain())}" for name, node in overrides if name.startswith("module")]
    if not given.config and not overrides:
        raise ConfigError("there is nothing to check: trainer fit --config run.yaml --dry-run --world-size 1024.")
    from trainer.config.read import read

    tree = read(given.config, overrides, findings)
    asked = entries(entries(tree).get("trainer")).get("accelerator", Node("auto", COMMAND_LINE))
    accelerator = str(asked.value)
    if accelerator in ("gpu", "cuda", "mps", "tpu"):
        asked.value, asked.text = "auto", None
    from trainer.config.loading import load

    return load(tree, findings), accelerator


def _per_machine(given: argparse.Namespace, configuration: Recipe) -> int:
    """Return the number of processes on each machine, and fill in `given.world_size`."""
    from trainer.cli.estimate.layouts import planned_devices

    per_machine: int | None = given.nproc_per_node or planned_devices(configuration.trainer)
    if given.world_size is None:
        if per_machine is None:
            raise ConfigError("--dry-run needs the number of processes: --world-size 1024.")
        given.world_size = per_machine * configuration.trainer.get("num_nodes", 1)
    per_machine = min(per_machine or 8, given.world_size)
    if given.world_size % per_machine:
        words = f"--world-size {given.world_size} is not a multiple of {per_machine}, the processes of a machine."
        raise ConfigError(f"{words} Give --nproc-per-node, or another --world-size.")
    return per_machine


# -- the checks --------------------------------------------------------------------------------------------------------


def _checks(
    given: argparse.Namespace, configuration: Recipe, accelerator: str, per_machine: int
) -> Iterator[CheckResult]:
    from trainer.cli.estimate.layouts import layout_of
    from trainer.config.specs import instantiate
    from trainer.distributed.process_group import SingleProcess
    from trainer.precision import resolve_precision
    from trainer.strategy import needed_device, resolve_strategy

    yield from (CheckResult("OK", "note", note) for note in configuration.notes)
    world = given.world_size
    arguments = configuration.trainer
    try:
        wanted = instantiate(arguments.pop("strategy", "auto"))
        needed = needed_device(wanted) if accelerator in ("auto", "tpu") else None
        device_type = needed or DEVICES.get(accelerator, accelerator)
        strategy, why = resolve_strategy(wanted, world, device_type)
        precision = resolve_precision(arguments.get("precision", "32-true"))
    except (ConfigError, ValueError) as error:
        yield CheckResult("FAIL", "strategy", str(error))
        return
    strategy.processes = SingleProcess(world_size=world)
    problems = strategy.problems(precision, device_type, world)
    yield from (CheckResult("FAIL", "strategy", problem) for problem in problems)
    yield CheckResult("OK", "processes", f"{world} on {device_type}, {per_machine} on each machine")
    try:
        trainer = _trainer(configuration)
    except (ConfigError, ValueError) as error:
        yield CheckResult("FAIL", "trainer", str(error))
        return
    config = trainer.config
    layout = layout_of(strategy)
    if problems:
        # The problems are reported; the checks below use the strategy of one process.
        config.strategy.processes = strategy.processes
    else:
        config = replace(config, strategy=strategy, device_type=device_type, num_processes=world)
        yield CheckResult("OK", "strategy", f"{strategy.name} ({why}), precision {precision.name}")
        yield from _layout(configuration, config, world, per_machine)
        yield from _bubble(configuration, layout)
    yield from _data(configuration, config, trainer.adopt, look=not given.no_data)
    yield from _memory(given, configuration, strategy.name, layout, per_machine)


def _trainer(configuration: Recipe) -> Trainer:
    """Return a trainer with the configuration's arguments, but for one process on the CPU."""
    from trainer.config.specs import instantiate
    from trainer.trainer import Trainer

    arguments = {name: instantiate(value) for name, value in configuration.trainer.items()}
    # This machine's devices say nothing about the cluster's.
    here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "compile": False}
    return Trainer(**{**arguments, **here})


def _layout(configuration: Recipe, config: ResolvedConfig, world: int, per_machine: int) -> Iterator[CheckResult]:
    """Report how the strategy lays the module out over the processes."""
    from trainer.cli.estimate.module import build_without_memory
    from trainer.distributed.fake_process_group import fake_process_group
    from trainer.model.activation_checkpointing import enable_activation_checkpointing
    from trainer.precision import resolve_precision

    precision = resolve_precision(configuration.trainer.get("precision", "32-true"))
    notes: list[str] = []
    try:
        module = build_without_memory(configuration.module, precision, notes)
        if config.settings.activation_checkpointing is not None:
            enable_activation_checkpointing(module, config.settings.activation_checkpointing)
        with fake_process_group(world, per_machine):
            lines = config.strategy.dry_run(module, precision)
    except ConfigError as error:
        yield CheckResult("FAIL", "layout", str(error))
    # The user's constructor, and torch's wrapping of the module, may raise anything.
    except Exception as error:
        yield CheckResult("FAIL", "layout", f"{type(error).__name__}: {error}")
    else:
        yield from (CheckResult("OK", "layout", line) for line in lines)
    yield from (CheckResult("OK", "module", note) for note in notes)


def _bubble(configuration: Recipe, layout: Layout) -> Iterator[CheckResult]:
    """Report how long the stages of a pipeline wait for each other."""
    from trainer.cli.estimate.layouts import planned_window
    from trainer.model.pipeline_stages import bubble

    stages, window = layout.pipeline, planned_window(configuration.trainer)
    if stages > 1:
        text = f"{stages} stages, {window} micro-batches: each stage waits {bubble(stages, window):.0%} of the time"
        fix = f"Set accumulate_grad_batches to {4 * stages}, with smaller micro-batches."
        yield check_result("WARN", window < stages, "bubble", text, fix)


def _data(
    configuration: Recipe, config: ResolvedConfig, adopt: Callable[[Run], object], look: bool
) -> Iterator[CheckResult]:
    """Report the problems that `fit` would raise; with `look`, also how the samples are split into steps.

    Args:
        adopt: called with the run, to attach a trainer to its module.
    """
    from trainer.config.specs import instantiate
    from trainer.loop.loaders import make_loaders
    from trainer.loop.run import Run, Session
    from trainer.precision import default_dtype
    from trainer.runs.preflight_checks import check_call
    from trainer.runs.resolved_config import step_options

    subject = "module"
    try:
        with default_dtype(config.precision.weights):
            module = instantiate(configuration.module) if configuration.data is None else _bare(configuration)
        datamodule = instantiate(configuration.data) if look else None
        check_call(config, None, "fit", module, {}, datamodule, None)
        if not look:
            return
        subject, session = "data", Session(config.settings)
        run = Run(config, session, "fit", module, datamodule)
        adopt(run)
        if datamodule is not None:
            datamodule.setup("fit")
        make_loaders(run, {"train": None, "val": None})
        assert run.train_loader is not None
        settings, subject = config.settings, "strategy"
        known = step_options(settings, micro_batch_size=run.train_loader.batch_size)
        where = config.precision, config.device_type, config.num_processes
        raise_problems(config.strategy.problems(*where, known, module), "fit")
    except ConfigError as error:
        yield CheckResult("FAIL", subject, str(error))
        return
    # This is the user's own code, on a machine that may not have the data.
    except Exception as error:
        found = f"it cannot be read here: {type(error).__name__}: {error}."
        yield CheckResult("WARN", "data", found, "Prepare it here, or leave this out with --no-data.")
        return
    yield from steps(run.train_loader, settings.window, config.strategy.processes)
    total = run.estimated_stepping_batches
    yield CheckResult("OK", "steps", "no end is given" if math.isinf(total) else f"{total:,} in all")


def _bare(configuration: Recipe) -> Any:
    """Return the module on the meta device, for data modules and loaders that use it."""
    import torch

    from trainer.config.specs import instantiate

    try:
        with torch.device("meta"):
            return instantiate(configuration.module)
    except Exception:
        return instantiate(configuration.module)


def steps(loader: BatchLoader, window: int, processes: SingleProcess) -> Iterator[CheckResult]:
    """Report the global batch, and how full the last step of an epoch is."""
    size, samples, batches = loader.batch_size, loader.samples_per_epoch, loader.length
    if size is None or samples is None or not batches:
        yield CheckResult("WARN", "global batch", "not known: the loader has no batch size or no length.")
        return
    readers = processes.readers
    global_batch = size * window * readers
    factors = f"{size} samples x {window} micro-batches x {readers} data-parallel ranks"
    yield CheckResult("OK", "global batch", f"{factors} = {global_batch:,} samples")
    number = math.ceil(batches / window)
    last_window, last = batches - (number - 1) * window, samples - (number - 1) * global_batch
    words = f"{samples:,} samples in {number:,} steps"
    words += f"; the last one has {last:,} of {global_batch:,} samples, in {last_window} of {window} micro-batches"
    fix = "Fewer processes or smaller micro-batches make that step fuller, and drop_last=True leaves it out."
    yield check_result("WARN", last * 2 < global_batch, "epoch", words, fix)


def _memory(
    given: argparse.Namespace, configuration: Recipe, name: str, layout: Layout, per_machine: int
) -> Iterator[CheckResult]:
    """Report the memory of each process, by the formulas of `trainer estimate`."""
    from trainer.cli.estimate.layouts import planned_window
    from trainer.cli.estimate.module import examine
    from trainer.model.memory import Setup, estimate_memory, number_sizes
    from trainer.precision import resolve_precision

    precision = resolve_precision(configuration.trainer.get("precision", "32-true"))
    setup = Setup(given.world_size, number_sizes(precision), per_machine, planned_window(configuration.trainer))
    try:
        found = examine(configuration, precision)
        model = found.transformer(checkpointing=bool(configuration.trainer.get("activation_checkpointing")))
        memory = estimate_memory(layout, found.size, setup, model)
    except (ConfigError, ValueError) as error:
        yield CheckResult("FAIL", "memory", str(error))
        return
    where = f"{name}, stage {memory.stage}" if layout.pipeline > 1 else name
    kept = "not counted" if memory.activations is None else f"about {gib(memory.activations)}"
    text = f"{where}: {gib(memory.device)}, at times {gib(memory.temporary)} more, activations {kept}"
    text += f"; {gib(memory.host)} on the host for each process"
    limit = given.device_memory or math.inf
    typed = ["--config", *given.config] if given.config else []
    typed += ["--devices", str(per_machine), "--num-nodes", str(given.world_size // per_machine), *given.changes]
    fix = f"It is more than {limit:g} GiB: compare the strategies, trainer estimate {shlex.join(typed)}"
    yield check_result("FAIL", memory.total > limit * 2**30, "memory", text, fix)
    yield from (CheckResult("OK", "module", note) for note in found.notes)
