"""`trainer estimate`: print the memory that a training needs on each process, for every strategy."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.cli.columns import print_fitted
from trainer.cli.estimate.layouts import label_words, planned_devices, planned_window
from trainer.cli.estimate.report import NEEDED, SPLIT_ACTIVATIONS, EstimateInput, as_data, report, zero_report
from trainer.cli.main import COMMANDS
from trainer.cli.options import CommandParser, config_option, positive, quantity, reports_errors
from trainer.compat.names import OTHER_PRECISIONS, SHORT_PRECISIONS
from trainer.config.plug_names import optimizers, precisions
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node
from trainer.errors import ConfigError, raise_problems, unknown_name_error
from trainer.model.memory import (
    Memory,
    ModelSize,
    Setup,
    StatePartitioning,
    Weight,
    activations,
    estimate_memory,
    number_sizes,
    supports_precision,
)

if TYPE_CHECKING:
    from trainer.config.loading import Configuration
    from trainer.precision import Precision

EXAMPLES = """\
  trainer estimate --params 7e9 --devices 8                   every strategy, on 8 processes
  trainer estimate --params 7e9 --devices 8 --num-nodes 4 --precision bf16-mixed --strategy fsdp
  trainer estimate --params 7B --devices 4 --zero             the table of the ZeRO paper
  trainer estimate --params 8e9 --trainable 20e6 --devices 1  with 20 million trainable, the others frozen
  trainer estimate --params 7e9 --devices 8 --precision bf16-mixed --layers 32 --hidden 4096 --sequence 2048 --batch 1
  trainer estimate --config examples/gpt/config.yaml --devices 2 --module.width 768 --module.layers 12
"""


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the estimate. Returns the exit code."""
    print_fitted(_report(arguments))
    return 0


def _report(arguments: list[str]) -> str:
    findings = Diagnostics()
    given, overrides = _parser().parse_with_overrides(arguments, findings)
    if bool(given.config or overrides) == (given.params is not None):
        raise ConfigError(
            "give either a configuration, trainer estimate --config run.yaml, or a number of parameters, "
            "trainer estimate --params 7e9. See trainer estimate --help."
        )
    _check_names(given)
    configuration = None if given.params is not None else _configuration(given, overrides, findings)
    _fill_in(given, {} if configuration is None else configuration.trainer)
    estimate_input = _input_of_number(given) if configuration is None else _input_of_configuration(given, configuration)
    if given.zero:
        elements = sum(weight.elements for weight in estimate_input.size.weights)
        return zero_report(elements, given.devices[-1] * given.num_nodes)
    from trainer.precision import resolve_precision

    precision = resolve_precision(given.precision)
    given.precision, numbers = precision.name, number_sizes(precision)
    layouts, configured = _layouts(given, configuration)
    options = {} if given.bucket is None else {"bucket": given.bucket}
    tables = {}
    for devices in given.devices:
        setup = Setup(devices * given.num_nodes, numbers, devices, given.accumulate, **options)
        tables[devices] = {
            label: _memory(layout, estimate_input, setup, configuration, precision) for label, layout in layouts.items()
        }
    transformer = estimate_input.transformer(given.checkpointing)
    if transformer is not None and any(layout.splits_models for layout in layouts.values()):
        estimate_input.notes.append(SPLIT_ACTIVATIONS)
    saved = None if transformer is None else activations(transformer, numbers)
    if given.json:
        return json.dumps(as_data(estimate_input, given, tables, saved), indent=2) + "\n"
    return report(estimate_input, given, tables, configured, transformer, saved)


# -- what is asked -----------------------------------------------------------------------------------------------------


def _parser() -> CommandParser:
    summary = COMMANDS["estimate"][1]
    parser = CommandParser(
        prog="trainer estimate",
        usage="trainer estimate (--params N | --config FILE [FILE ...]) [OPTIONS]",
        description=summary[0].upper() + summary[1:] + ". Nothing is run, and no GPU is needed.",
        epilog=f"examples:\n{EXAMPLES}",
    )
    parameters = quantity(1000, "write 7e9, 7B or 350M")
    group = parser.add_argument_group("what is trained")
    what = group.add_argument
    what("--params", metavar="N", type=parameters, help="number of parameters: 7e9, 7B, 350M")
    what("--trainable", metavar="N", type=parameters, help="how many of them are trained; the others are frozen")
    about_config = "its module is built without memory and counted. Its values can be changed as in trainer fit"
    about_config = f"a configuration instead: {about_config}: --module.width 768"
    config_option(group, about_config)
    where = parser.add_argument_group("where and how (default: as the configuration says)").add_argument
    several = "processes on each machine; several numbers make several tables (default: 8)"
    where("--devices", metavar="N", nargs="+", type=positive, help=several)
    where("--num-nodes", metavar="N", type=positive, help="machines (default: 1)")
    where("--strategy", metavar="NAME", help="only the rows with this word, such as fsdp or deepspeed_stage_2")
    where("--precision", metavar="NAME", help="as for the trainer, such as bf16-mixed (default: 32-true)")
    where("--optimizer", metavar="NAME", help="a class of torch.optim with its default options (default: AdamW)")
    where("--bucket", metavar="N", type=parameters, help="elements of DeepSpeed's reduce_bucket_size (default: 5e8)")
    where("--accumulate", metavar="N", type=positive, help="micro-batches of a step (default: 1)")
    acts = parser.add_argument_group("activations of a transformer, for an estimate of them").add_argument
    acts("--layers", metavar="N", type=positive, help="transformer layers")
    acts("--hidden", metavar="N", type=positive, help="width of the model")
    acts("--sequence", metavar="N", type=positive, help="tokens of a sample")
    acts("--batch", metavar="N", type=positive, help="samples of a micro-batch on one process")
    acts("--checkpointing", action="store_true", help="with activation checkpointing of every layer")
    how = parser.add_argument_group("output").add_argument
    about_zero = "the table of the ZeRO paper: Adam in mixed precision, stages 1 to 3, with and without master weights"
    how("--zero", action="store_true", help=about_zero)
    how("--json", action="store_true", help="bytes, as JSON")
    return parser


def _check_names(given: argparse.Namespace) -> None:
    """Check the names of options before torch is imported, which takes seconds."""
    words = label_words()
    for word in (given.strategy or "").split():
        if not any(word.lower() in one.lower() for one in words):
            raise unknown_name_error("strategy", word, words)
    known = [*precisions(), *SHORT_PRECISIONS]
    if given.precision is not None and given.precision not in known:
        raise unknown_name_error("precision", given.precision, known, OTHER_PRECISIONS)
    if given.optimizer is not None and (there := optimizers()) and given.optimizer.lower() not in map(str.lower, there):
        raise unknown_name_error("optimizer", given.optimizer, there)


def _fill_in(given: argparse.Namespace, planned: Mapping[str, Any]) -> None:
    """Fill in what the command line leaves open, from the arguments of a trainer."""
    given.devices = given.devices or [planned_devices(planned) or 8]
    given.num_nodes = given.num_nodes or planned.get("num_nodes", 1)
    given.accumulate = given.accumulate or planned_window(planned)
    given.precision = given.precision or planned.get("precision", "32-true")
    given.checkpointing = given.checkpointing or bool(planned.get("activation_checkpointing"))


def _layouts(
    given: argparse.Namespace, configuration: Configuration | None
) -> tuple[dict[str, StatePartitioning], str | None]:
    """Return the layouts to print by label, and the label of the configuration's strategy."""
    from trainer.cli.estimate.layouts import layout_of, strategy_rows
    from trainer.config.check import instantiate
    from trainer.strategy import resolve_strategy

    layouts, label = strategy_rows(), None
    names = {name for several in layouts for name in re.findall(r"\w+", several)}
    if configuration is not None and "strategy" in configuration.trainer:
        wanted = instantiate(configuration.trainer["strategy"])
        strategy, _ = resolve_strategy(wanted, given.devices[-1] * given.num_nodes)
        configured = layout_of(strategy)
        label = next((name for name, layout in layouts.items() if layout == configured), f"{strategy.name} as given")
        layouts[label] = configured
    word = (given.strategy or "").lower()
    found = {label: layout for label, layout in layouts.items() if word in label.lower()}
    if not found:
        raise unknown_name_error("strategy", word, names)
    return {name: row for name, row in found.items() if supports_precision(row, given.precision)}, label


def _memory(
    layout: StatePartitioning,
    estimate_input: EstimateInput,
    setup: Setup,
    configuration: Configuration | None,
    precision: Precision,
) -> Memory:
    """Return the memory of a layout; of a model that is split over processes that of the stage that needs most."""
    if not layout.splits_models or configuration is None:
        return estimate_memory(layout, estimate_input.size, setup)
    from trainer.cli.estimate.stages import largest_stage
    from trainer.config.check import instantiate
    from trainer.strategy import resolve_strategy

    strategy, _ = resolve_strategy(instantiate(configuration.trainer["strategy"]), setup.processes)
    raise_problems(strategy.problems(precision, "cuda", setup.processes), "estimate")
    return largest_stage(configuration, strategy, layout, estimate_input.size, setup, None, precision).memory


def _shape(given: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of a transformer from the command line."""
    return {name: value for name in NEEDED if (value := getattr(given, name)) is not None}


def _input_of_number(given: argparse.Namespace) -> EstimateInput:
    total, trainable = given.params, given.params if given.trainable is None else given.trainable
    if trainable > total:
        raise ConfigError(f"--trainable {trainable} is more than --params {total}.")
    weights = [Weight(trainable, trainable)]
    weights += [Weight(total - trainable, total - trainable, False, False)] if total > trainable else []
    note = "with --layers the weights that fsdp and ZeRO-3 gather for a layer are counted in ~more too"
    size = ModelSize(weights, block=total // given.layers if given.layers else 0)
    if given.optimizer is not None:
        from trainer.cli.estimate.module import named_states

        size = replace(size, states=named_states(given.optimizer))
    return EstimateInput("", size, shape=_shape(given), notes=[] if given.layers else [note])


def _configuration(given: argparse.Namespace, overrides: list[tuple[str, Any]], findings: Diagnostics) -> Configuration:
    if given.trainable is not None:
        raise ConfigError("--trainable goes with --params; a configuration's module says itself what is frozen.")
    from trainer.config.read import read

    if given.precision is not None:
        overrides.append(("trainer.precision", Node(given.precision, COMMAND_LINE)))
    # The training need not run on this machine.
    overrides.append(("trainer.accelerator", Node("auto", COMMAND_LINE)))
    tree = read(given.config, overrides, findings)
    from trainer.config.loading import load

    return load(tree, findings)


def _input_of_configuration(given: argparse.Namespace, configuration: Configuration) -> EstimateInput:
    from trainer.cli.estimate.module import examine, named_states

    estimate_input = examine(configuration, None if given.optimizer is None else named_states(given.optimizer))
    estimate_input.shape.update(_shape(given))
    estimate_input.notes[:0] = configuration.notes
    return estimate_input
