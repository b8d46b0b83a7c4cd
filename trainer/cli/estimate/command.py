"""`trainer estimate`: print the memory that a training needs on each process, for every strategy."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from trainer.cli.estimate.report import EstimateInput, ModuleSize, as_data, report, zero_report
from trainer.cli.main import COMMANDS, reject_unknown, usage_error
from trainer.cli.options import ErrorParser, overrides_of
from trainer.errors import ConfigError, unknown_name_error
from trainer.model.memory import (
    ADAMW,
    LAYOUTS,
    MemoryLayout,
    OptimizerStates,
    Transformer,
    Weight,
    activations,
    needed,
    number_sizes,
    possible,
)

EXAMPLES = """\
  trainer estimate --params 7e9 --devices 8                   every strategy, on 8 processes
  trainer estimate --params 7e9 --devices 8 --num-nodes 4 --precision bf16-mixed --strategy fsdp
  trainer estimate --params 7B --devices 4 --zero             the table of the ZeRO paper
  trainer estimate --params 8e9 --trainable 20e6 --devices 1  with 20 million trainable, the others frozen
  trainer estimate --params 7e9 --devices 8 --precision bf16-mixed --layers 32 --hidden 4096 --sequence 2048 --batch 1
  trainer estimate --config examples/gpt/config.yaml --devices 2 --module.width 768 --module.layers 12
"""


def run(arguments: list[str]) -> int:
    """Print the estimate. Returns the exit code."""
    parser = _parser()
    if "-h" in arguments or "--help" in arguments:
        print(parser.format_help(), f"examples:\n{EXAMPLES}", sep="\n", end="")
        return 0
    try:
        print(_report(parser, arguments), end="")
    except ConfigError as error:
        return usage_error(str(error))
    return 0


def _report(parser: argparse.ArgumentParser, arguments: list[str]) -> str:
    from trainer.config.tree import Diagnostics

    findings = Diagnostics()
    overrides, fixed = overrides_of(arguments, findings)
    given, rest = parser.parse_known_args(fixed)
    reject_unknown(parser, rest, "trainer estimate")
    if bool(given.config or overrides) == (given.params is not None):
        raise ConfigError(
            "give either a configuration, trainer estimate --config run.yaml, or a number of parameters, "
            "trainer estimate --params 7e9. See trainer estimate --help."
        )
    layouts = _chosen(given.strategy)
    states = None
    if given.optimizer is not None:
        from trainer.cli.estimate.module import named_states

        states = named_states(given.optimizer)
    if given.params is not None:
        subject = _of_number(given, states)
    else:
        subject = _of_configuration(given, overrides, findings, states)
    weights = subject.size.weights
    if given.zero:
        return zero_report(sum(weight.elements for weight in weights), subject.per_machine[-1] * subject.machines)
    from trainer.precision import resolve_precision

    precision = resolve_precision(subject.precision)
    subject.precision, subject.bucket = precision.name, given.bucket or subject.bucket
    layouts = [layout for layout in layouts if possible(layout, subject.precision)]
    tables = {
        devices: [needed(layout, weights, subject.setup(devices)) for layout in layouts]
        for devices in subject.per_machine
    }
    transformer = _transformer(subject, given)
    kept = None if transformer is None else activations(transformer, number_sizes(precision))
    if given.json:
        return json.dumps(as_data(subject, tables, kept), indent=2) + "\n"
    return report(subject, tables, transformer, kept)


# -- what is asked -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    summary = COMMANDS["estimate"][1]
    parser = ErrorParser(
        prog="trainer estimate",
        usage="trainer estimate (--params N | --config FILE [FILE ...]) [OPTIONS]",
        description=summary[0].upper() + summary[1:] + ". Nothing is run, and no GPU is needed.",
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this help")
    what = parser.add_argument_group("what is trained").add_argument
    what("--params", metavar="N", type=_number, help="number of parameters: 7e9, 7B, 350M")
    what("--trainable", metavar="N", type=_number, help="how many of them are trained; the others are frozen")
    what(
        "--config",
        metavar="FILE",
        nargs="+",
        action="extend",
        default=[],
        help="a configuration instead: its module is built without memory and counted. Its values can be changed as in "
        "trainer fit: --module.width 768",
    )
    where = parser.add_argument_group("where and how (default: as the configuration says)").add_argument
    where(
        "--devices",
        metavar="N",
        nargs="+",
        type=int,
        help="processes on each machine; several numbers make several tables (default: 8)",
    )
    where("--num-nodes", metavar="N", type=int, help="machines (default: 1)")
    where("--strategy", metavar="NAME", help="only the rows with this word, such as fsdp or deepspeed_stage_2")
    where("--precision", metavar="NAME", help="as for the trainer, such as bf16-mixed (default: 32-true)")
    where("--optimizer", metavar="NAME", help="a class of torch.optim with its default options (default: AdamW)")
    where("--bucket", metavar="N", type=_number, help="elements of DeepSpeed's reduce_bucket_size (default: 5e8)")
    where("--accumulate", metavar="N", type=int, help="micro-batches of a step (default: 1)")
    acts = parser.add_argument_group("activations of a transformer, for an estimate of them").add_argument
    acts("--layers", metavar="N", type=int, help="transformer layers")
    acts("--hidden", metavar="N", type=int, help="width of the model")
    acts("--sequence", metavar="N", type=int, help="tokens of a sample")
    acts("--batch", metavar="N", type=int, help="samples of a micro-batch on one process")
    acts("--checkpointing", action="store_true", help="with activation checkpointing of every layer")
    how = parser.add_argument_group("output").add_argument
    how(
        "--zero",
        action="store_true",
        help="the table of the ZeRO paper: Adam in mixed precision, stages 1 to 3, with and without master weights",
    )
    how("--json", action="store_true", help="bytes, as JSON")
    return parser


def _number(text: str) -> int:
    """Return a count written as `7e9`, `7B`, `350M` or `1_000`."""
    match = re.fullmatch(r"([0-9._]+(?:[eE]\+?\d+)?)\s*([kKmMbBtT]?)", text)
    try:
        number = float(match[1]) * 10 ** {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}[match[2].lower()] if match else 0
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters: write 7e9, 7B or 350M")
    return round(number)


def _chosen(word: str | None) -> list[MemoryLayout]:
    """Return the layouts whose label contains a word; a match of a complete word is preferred."""
    if word is None:
        return list(LAYOUTS)
    words = {layout.label: re.findall(r"[\w-]+", layout.label) for layout in LAYOUTS}
    exact = [layout for layout in LAYOUTS if word.lower() in [w.lower() for w in words[layout.label]]]
    found = exact or [layout for layout in LAYOUTS if word.lower() in layout.label.lower()]
    if not found:
        raise unknown_name_error("strategy", word, {name for names in words.values() for name in names})
    return found


def _counts(given: argparse.Namespace, devices: list[int], machines: int, window: int) -> tuple[list[int], int, int]:
    """Return processes on each machine, machines and window from the command line, or else these."""
    devices = given.devices or devices
    machines = machines if given.num_nodes is None else given.num_nodes
    window = window if given.accumulate is None else given.accumulate
    for name, value in (*(("devices", n) for n in devices), ("num-nodes", machines), ("accumulate", window)):
        if value < 1:
            raise ConfigError(f"--{name} {value}: give a number from 1.")
    return devices, machines, window


def _of_number(given: argparse.Namespace, states: OptimizerStates | None) -> EstimateInput:
    total, trainable = given.params, given.params if given.trainable is None else given.trainable
    if trainable > total:
        raise ConfigError(f"--trainable {trainable} is more than --params {total}.")
    devices, machines, window = _counts(given, [8], 1, 1)
    weights = [Weight(trainable, trainable)]
    weights += [Weight(total - trainable, total - trainable, False, False)] if total > trainable else []
    size = ModuleSize("", weights, states or ADAMW)
    if given.layers:
        size.block = total // given.layers
    else:
        size.notes.append("with --layers the weights that fsdp and ZeRO-3 gather for a layer are counted in ~more too")
    return EstimateInput(size, given.precision or "32-true", machines, devices, window)


def _of_configuration(
    given: argparse.Namespace, overrides: list[tuple[str, Any]], findings: Any, states: OptimizerStates | None
) -> EstimateInput:
    if given.trainable is not None:
        raise ConfigError("--trainable goes with --params; a configuration's module says itself what is frozen.")
    from trainer.config.tree import COMMAND_LINE, Node

    if given.precision is not None:
        overrides.append(("trainer.precision", Node(given.precision, COMMAND_LINE)))
    # The training need not run on this machine.
    overrides.append(("trainer.accelerator", Node("auto", COMMAND_LINE)))
    if not given.config:
        findings.report()
    from trainer.cli.estimate.module import examine
    from trainer.config.check import ClassSpec
    from trainer.config.load import load

    configuration = load(given.config, overrides, findings)
    arguments = configuration.trainer
    wanted = arguments.get("devices", "auto")
    planned = [wanted] if isinstance(wanted, int) and wanted > 0 else [len(wanted)] if isinstance(wanted, list) else [8]
    devices, machines, window = _counts(
        given, planned, arguments.get("num_nodes", 1), arguments.get("accumulate_grad_batches", 1)
    )
    size = examine(configuration, states)
    size.notes[:0] = configuration.notes
    strategy = arguments.get("strategy")
    return EstimateInput(
        size=size,
        precision=str(arguments.get("precision", "32-true")),
        machines=machines,
        per_machine=devices,
        window=window,
        checkpointing=bool(arguments.get("activation_checkpointing")),
        strategy=_name(strategy.cls if isinstance(strategy, ClassSpec) else strategy),
    )


def _name(strategy: Any) -> str | None:
    """Return the name of a strategy given as name or class; None: none is given."""
    from trainer.strategy import Strategy

    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        return strategy.name
    return None if strategy is None else str(strategy)


def _transformer(subject: EstimateInput, given: argparse.Namespace) -> Transformer | None:
    """Return the sizes from the command line and the module; None when they do not suffice."""
    named = {name: getattr(given, name) for name in ("layers", "hidden", "sequence", "batch")}
    sizes = {**subject.size.shape, **{name: value for name, value in named.items() if value is not None}}
    if not named.keys() <= sizes.keys():
        return None
    return Transformer(**sizes, checkpointing=given.checkpointing or subject.checkpointing)
