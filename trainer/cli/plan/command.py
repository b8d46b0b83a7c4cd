"""`trainer plan`: rank the ways to split a model over GPUs, by formulas alone."""

from __future__ import annotations

import argparse
import json

from trainer.cli.columns import print_fitted
from trainer.cli.main import COMMANDS
from trainer.cli.options import CommandParser, positive, quantity, reports_errors
from trainer.cli.plan.architecture import NAMES, architecture_of_options, assumed, read_config
from trainer.cli.plan.candidates import Cluster, GlobalBatch, rank
from trainer.cli.plan.report import as_data, report
from trainer.compat.names import OTHER_PRECISIONS
from trainer.errors import ConfigError, unknown_name_error
from trainer.model.memory import DtypeSizes
from trainer.model.parallel_cost import Architecture

PRECISIONS = {
    "32-true": DtypeSizes(4, 4),
    "bf16-mixed": DtypeSizes(4, 2),
    "16-mixed": DtypeSizes(4, 2),
    "bf16-true": DtypeSizes(2, 2),
    "16-true": DtypeSizes(2, 2),
    "fp8": DtypeSizes(4, 2),
    "fp8-rowwise": DtypeSizes(4, 2),
    "mxfp8": DtypeSizes(4, 2),
}
"""Bytes of numbers by precision; trainer.precision has them too, and imports torch."""
EXAMPLES = """\
  trainer plan --config model/config.json --gpus 64 --memory 80G --seq 32k
  trainer plan --layers 80 --hidden 8192 --heads 64 --kv-heads 8 --vocab 128256 --gpus 256 --memory 80G --seq 8k
  trainer plan --params 70b --gpus 64 --memory 80G --seq 8k --global-batch-tokens 2M --json
"""


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the plan. Returns the exit code: 1 if no layout fits."""
    given = _parser().parse(arguments)
    notes: list[str] = []
    model = _model(given, notes)
    cluster = Cluster(
        given.gpus,
        min(given.gpus_per_node, given.gpus),
        given.memory * (1 - given.headroom),
        given.flops,
        given.link,
        given.network,
    )
    if cluster.gpus % cluster.per_machine:
        raise ConfigError(f"--gpus {cluster.gpus} is not a multiple of --gpus-per-node {cluster.per_machine}.")
    if given.precision not in PRECISIONS:
        raise unknown_name_error("precision", given.precision, PRECISIONS, OTHER_PRECISIONS)
    if given.memory < 1e9:
        raise ConfigError(f"--memory is {given.memory:,} bytes: give it with its unit, such as 80G.")
    if "fp8" in given.precision:
        notes.append("products of 8 bits are faster by what --flops says; give the figure you measure")
    batch = GlobalBatch(_samples(given, notes), given.seq, PRECISIONS[given.precision], given.precision)
    ranked, excluded = rank(model, cluster, batch)
    if given.json:
        print(json.dumps({**as_data(model, cluster, batch, ranked, excluded), "notes": notes}, indent=2))
    else:
        print_fitted(report(model, cluster, batch, ranked, excluded, given.top, notes, given.precision))
    return int(not ranked)


def _model(given: argparse.Namespace, notes: list[str]) -> Architecture:
    sizes = [name for name in NAMES if getattr(given, name) is not None]
    if sum([given.config is not None, given.params is not None, bool(sizes)]) > 1:
        raise ConfigError("give one of --config, --params, and the sizes --layers, --hidden, --heads and --vocab.")
    if given.config is not None:
        model, beyond = read_config(given.config)
        notes.extend(beyond)
        return model
    if given.params is not None:
        notes.append("the shape is assumed from --params; give --config or --layers, --hidden, --heads and --vocab")
        return assumed(given.params)
    return architecture_of_options(given)


def _samples(given: argparse.Namespace, notes: list[str]) -> int:
    """Return the sequences of a step."""
    if given.batch is not None and given.global_batch_tokens is not None:
        raise ConfigError("give either --batch, in sequences, or --global-batch-tokens.")
    if given.batch is not None:
        return int(given.batch)
    tokens = given.global_batch_tokens or 4 * 2**20
    if given.global_batch_tokens is None:
        # Sequences that all numbers of readers can share.
        tokens = max(1, -(-tokens // given.seq // given.gpus)) * given.gpus * given.seq
        notes.append(f"a step of {tokens:,} tokens is assumed; give --batch or --global-batch-tokens")
    if tokens < given.seq:
        raise ConfigError(f"--global-batch-tokens {tokens} is less than one sequence of {given.seq} tokens.")
    return int(tokens // given.seq)


def _parser() -> CommandParser:
    summary = COMMANDS["plan"][1]
    parser = CommandParser(
        prog="trainer plan",
        usage="trainer plan (--config FILE | --params N | --layers N ...) --gpus N --memory SIZE --seq N [OPTIONS]",
        description=summary[0].upper() + summary[1:] + ". Nothing is run, and no GPU is needed.",
        epilog=f"examples:\n{EXAMPLES}",
    )
    model = parser.add_argument_group("the model: a decoder of equal layers").add_argument
    model("-c", "--config", metavar="FILE", help="config.json of a Hugging Face model")
    model("--params", metavar="N", type=quantity(1000), help="only the number of parameters; the shape is assumed")
    model("--layers", metavar="N", type=positive, help="blocks of attention and MLP")
    model("--hidden", metavar="N", type=positive, help="width of the model")
    model("--heads", metavar="N", type=positive, help="heads of attention")
    model("--vocab", metavar="N", type=positive, dest="vocabulary", help="size of the vocabulary")
    model("--kv-heads", metavar="N", type=positive, help="heads of keys and values (default: --heads)")
    model("--head-dim", metavar="N", type=positive, help="width of a head (default: hidden / heads)")
    about = "width of the MLP, or of an expert (default: 8/3 hidden)"
    model("--intermediate", metavar="N", type=positive, help=about)
    model("--experts", metavar="N", type=positive, help="experts of a layer")
    model("--experts-per-token", metavar="N", type=positive, help="experts that compute a token (default: 2)")
    model("--no-gate", action="store_true", help="an MLP of two layers in place of three, by default 4 hidden wide")
    model("--tied", action="store_true", help="the head has the weights of the embedding")
    where = parser.add_argument_group("the GPUs").add_argument
    where("--gpus", metavar="N", type=positive, required=True, help="number of GPUs")
    where("--memory", metavar="SIZE", type=quantity(1000), required=True, help="of a GPU: 80G (10^9 bytes)")
    where("--gpus-per-node", metavar="N", type=positive, default=8, help="GPUs of a machine (default: 8)")
    about = "share of the memory for the libraries and fragments (default: 0.1)"
    where("--headroom", metavar="SHARE", type=_share, default=0.1, help=about)
    about = "operations of a GPU in a second, as trainings reach them (default: 400T)"
    where("--flops", metavar="N", type=quantity(1000), default=400e12, help=about)
    about = "bytes that a GPU sends in a second within a machine (default: 300G)"
    where("--link", metavar="N", type=quantity(1000), default=300e9, help=about)
    where("--network", metavar="N", type=quantity(1000), default=50e9, help="and to others (default: 50G)")
    what = parser.add_argument_group("a step").add_argument
    what("--seq", metavar="N", type=quantity(1024), required=True, help="tokens of a sequence: 32k is 32,768")
    what("--batch", metavar="N", type=positive, help="sequences of a step on all GPUs")
    about = "tokens of a step on all GPUs (default: 4M, which is 4 x 1024 x 1024)"
    what("--global-batch-tokens", metavar="N", type=quantity(1024), help=about)
    what("--precision", metavar="NAME", default="bf16-mixed", help="as for the trainer (default: bf16-mixed)")
    how = parser.add_argument_group("output").add_argument
    how("--top", metavar="N", type=positive, default=10, help="layouts to print (default: 10)")
    how("--json", action="store_true", help="all layouts, in bytes and seconds, as JSON")
    return parser


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share from 0 to 1, such as 0.1")
    return share
