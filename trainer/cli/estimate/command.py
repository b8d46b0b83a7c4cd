"""`trainer estimate`: print the memory that a training needs on each process, by strategy or by layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.columns import print_fitted
from trainer.cli.estimate.layouts import fitting, planned_devices, planned_window
from trainer.cli.main import COMMANDS
from trainer.cli.options import CommandParser, config_option, positive, recipe_of, reports_errors, size
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node
from trainer.errors import ConfigError
from trainer.model.memory import Layout, ModelSize, Setup, Weight, estimate_memory, number_sizes

if TYPE_CHECKING:
    from trainer.cli.estimate.module import EstimateInput
    from trainer.config.loading import Recipe
    from trainer.precision import Precision

SIZES = {
    "hidden": "width of the model",
    "sequence": "tokens of a sample: 4k is 4,096",
    "batch": "samples of a micro-batch on one process",
    "heads": "heads of attention",
    "kv_heads": "heads of keys and values (default: --heads)",
    "intermediate": "width of the MLP",
    "vocabulary": "size of the vocabulary",
}
"""Options for the sizes of a transformer."""
LEFT = 0.1
"""Share of a GPU's memory that is left for libraries and fragments."""
EXAMPLES = """\
  trainer estimate --params 7e9 --devices 8                   every strategy, on 8 processes
  trainer estimate --params 7e9 --devices 8 --precision bf16-mixed --layers 32 --hidden 4096 --sequence 2048 --batch 1
  trainer estimate --config examples/gpt/config.yaml --devices 2 --module.width 768 --module.layers 12
  trainer estimate --config model/config.json --gpus 64 --memory 80G --sequence 32k     the layouts that fit
"""


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the estimate. Returns the exit code: 1 if no layout fits."""
    findings = Diagnostics()
    given, overrides = _parser().parse_with_overrides(arguments, findings)
    _check(given, bool(given.config or overrides))
    foreign = len(given.config) == 1 and not overrides and _is_hugging_face(given.config[0])
    configuration = None if given.params or foreign else _configuration(given, overrides, findings)
    from trainer.cli.estimate.module import examine, examine_hugging_face
    from trainer.cli.estimate.report import as_data
    from trainer.precision import resolve_precision

    _fill_in(given, {} if configuration is None else configuration.trainer)
    precision = resolve_precision(given.precision)
    given.precision = precision.name
    if configuration is not None:
        found = examine(configuration, precision)
        found.notes[:0] = configuration.notes
    else:
        found = examine_hugging_face(given.config[0], precision) if foreign else _input_of_number(given)
    found.shape |= {name: value for name in SIZES if (value := getattr(given, name)) is not None}
    if given.gpus:
        data, text = _fitting(given, found, precision)
    else:
        data, text = _strategies(given, found, precision, configuration)
    if given.json:
        print(json.dumps({**as_data(found, given), **data}, indent=2))
    else:
        print_fitted(text)
    return int(data.get("layouts") == [])


def _strategies(
    given: argparse.Namespace, found: EstimateInput, precision: Precision, configuration: Recipe | None
) -> tuple[dict[str, Any], str]:
    """Return the estimates of the strategies, as data and as text."""
    from trainer.cli.estimate.report import report

    layouts, configured = _layouts(given, configuration)
    setup = Setup(given.devices * given.num_nodes, number_sizes(precision), given.devices, given.accumulate)
    model = found.transformer(given.checkpointing)
    rows = {label: estimate_memory(layout, found.size, setup, model) for label, layout in layouts.items()}
    several = [{"label": label, **asdict(memory), "device": memory.device} for label, memory in rows.items()]
    data = {"processes": setup.processes, "strategies": several}
    return data, report(found, given, model, rows, configured)


def _fitting(given: argparse.Namespace, found: EstimateInput, precision: Precision) -> tuple[dict[str, Any], str]:
    """Return the layouts that fit, as data and as text."""
    from trainer.cli.estimate.report import fitting_report

    found.shape.setdefault("batch", 1)
    model = found.transformer(given.checkpointing)
    if model is None or "heads" not in found.shape or not found.size.blocks:
        raise ConfigError("layouts need --hidden, --heads, --sequence and --layers: give those that are not known.")
    per_machine = min(given.devices, given.gpus)
    if given.gpus % per_machine:
        raise ConfigError(f"--gpus {given.gpus} is not a multiple of --devices {per_machine}, the GPUs of a machine.")
    setup = Setup(given.gpus, number_sizes(precision), per_machine, given.accumulate)
    ranked, least = fitting(model, found.size, setup, precision, given.memory * (1 - LEFT))
    return {"layouts": ranked, "least": least}, fitting_report(found, given, model, ranked, least)


# -- the question ------------------------------------------------------------------------------------------------------


def _parser() -> CommandParser:
    summary = COMMANDS["estimate"][1]
    parser = CommandParser(
        prog="trainer estimate",
        usage="trainer estimate (--params N | --config FILE [FILE ...]) [--gpus N --memory SIZE] [OPTIONS]",
        description=summary[0].upper() + summary[1:] + ". Nothing is run, and no GPU is needed.",
        epilog=f"examples:\n{EXAMPLES}",
    )
    group = parser.add_argument_group("the training (default: as the configuration says)")
    add = group.add_argument
    add("--params", metavar="N", type=size, help="number of parameters: 7e9, 7B, 350M")
    about = "a configuration, or the config.json of a Hugging Face model: the module is built without memory and "
    config_option(group, about + "counted. Values can be changed as in trainer fit: --module.width 768")
    add("--devices", metavar="N", type=positive, help="processes on each machine (default: 8)")
    add("--num-nodes", metavar="N", type=positive, help="machines (default: 1)")
    add("--precision", metavar="NAME", help="as for the trainer (default: 32-true, with --gpus bf16-mixed)")
    add("--accumulate", metavar="N", type=positive, help="micro-batches of a step (default: 1)")
    add("--checkpointing", action="store_true", help="with activation checkpointing of every layer")
    add = parser.add_argument_group("sizes of a transformer, for its activations and layouts").add_argument
    add("--layers", metavar="N", type=positive, default=0, help="transformer layers, with --params")
    for name, about in SIZES.items():
        kind = _tokens if name == "sequence" else positive
        add(f"--{name.replace('_', '-')}", metavar="N", type=kind, help=about)
    add = parser.add_argument_group("output").add_argument
    add("--gpus", metavar="N", type=positive, help="print the layouts that fit on this number of GPUs")
    add("--memory", metavar="SIZE", type=size, help="of a GPU: 80G (10^9 bytes)")
    add("--json", action="store_true", help="bytes, as JSON")
    return parser


def _tokens(text: str) -> int:
    """Return a number of tokens: 4k is 4,096."""
    return size(text.lower().replace("k", "ki"))


def _check(given: argparse.Namespace, has_configuration: bool) -> None:
    """Check options before torch is imported, which takes seconds."""
    if has_configuration == (given.params is not None):
        raise ConfigError("give either a configuration (--config run.yaml) or a number of parameters (--params 7e9).")
    if (given.gpus is None) != (given.memory is None) or (given.memory or 1e9) < 1e9:
        raise ConfigError("--gpus and --memory go together, the memory with its unit: --gpus 64 --memory 80G.")


def _fill_in(given: argparse.Namespace, planned: Mapping[str, Any]) -> None:
    """Fill in what the command line leaves open, from the arguments of a trainer."""
    defaults = {
        "devices": planned_devices(planned) or 8,
        "num_nodes": planned.get("num_nodes", 1),
        "accumulate": planned_window(planned),
        "precision": planned.get("precision", "bf16-mixed" if given.gpus else "32-true"),
    }
    for name, value in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.checkpointing |= bool(planned.get("activation_checkpointing"))


def _layouts(given: argparse.Namespace, configuration: Recipe | None) -> tuple[dict[str, Layout], str | None]:
    """Return the layouts to print by label, and the label of the configuration's strategy."""
    from trainer.cli.estimate.layouts import layout_of, strategy_rows
    from trainer.config.specs import instantiate
    from trainer.strategy import resolve_strategy

    layouts, label = strategy_rows(), None
    if configuration is not None and "strategy" in configuration.trainer:
        wanted = instantiate(configuration.trainer["strategy"])
        strategy, _ = resolve_strategy(wanted, given.devices * given.num_nodes)
        configured = layout_of(strategy)
        label = next((name for name, layout in layouts.items() if layout == configured), f"{strategy.name} as given")
        layouts[label] = configured
    return layouts, label


def _input_of_number(given: argparse.Namespace) -> EstimateInput:
    from trainer.cli.estimate.module import EstimateInput

    layers, table = given.layers, (given.vocabulary or 0) * (given.hidden or 0)
    if given.params < 2 * table + layers:
        raise ConfigError(f"--params {given.params} is less than two tables of --vocabulary x --hidden.")
    block = (given.params - 2 * table) // layers if layers else 0
    sizes = table, block, given.params - table - layers * block
    first, each, last = (Weight(elements, elements, is_matrix=True) for elements in sizes)
    return EstimateInput("model", ModelSize([first], [[each]] * layers, [last]))


def _is_hugging_face(path: str) -> bool:
    """Return True for the config.json of a Hugging Face model."""
    with suppress(OSError, ValueError, TypeError):
        return "model_type" in json.loads(Path(path).read_text(encoding="utf-8"))
    return False


def _configuration(given: argparse.Namespace, overrides: list[tuple[str, Any]], findings: Diagnostics) -> Recipe:
    if given.precision is not None:
        overrides.append(("trainer.precision", Node(given.precision, COMMAND_LINE)))
    # The training need not run on this machine.
    overrides.append(("trainer.accelerator", Node("auto", COMMAND_LINE)))
    return recipe_of(given.config, overrides, findings)
