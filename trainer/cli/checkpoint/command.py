"""`trainer checkpoint`: list, show and verify checkpoints, and export their weights."""

from __future__ import annotations

import argparse
import json
import re
import sys

from trainer.cli.options import CommandParser, reports_errors, size

SUBCOMMANDS = {
    "ls": "list the checkpoints of a run",
    "show": "show what is in a checkpoint",
    "verify": "read checkpoints completely and compare every file with its checksum",
    "export": "write the weights alone, to one safetensors file or to several, also as a Hugging Face model",
    "import": "write a file of Lightning's as a checkpoint",
}

EXAMPLES = {
    "ls": """\
  trainer checkpoint ls runs/digits                    all runs below
  trainer checkpoint ls runs/digits/version_0 --metric val_acc
  trainer checkpoint ls runs/digits/version_0 --verify --json
""",
    "show": """\
  trainer checkpoint show runs/digits/version_0        the last one
  trainer checkpoint show runs/digits/version_0 --ckpt best --all
  trainer checkpoint show runs/digits/version_0/checkpoints/epoch=1-step=44
""",
    "verify": """\
  trainer checkpoint verify runs/digits/version_0      each one of this run
  trainer checkpoint verify runs/digits/version_0 --ckpt last && echo intact
""",
    "export": """\
  trainer checkpoint export runs/digits/version_0 digits.safetensors --ckpt best
  trainer checkpoint export runs/gpt/version_0 gpt.safetensors --prefix model. --expand-tied
  trainer checkpoint export runs/gpt/version_0 gpt --max-shard-size 5GB --dtype bfloat16
  trainer checkpoint export runs/llama/version_0 llama --hf              for from_pretrained("llama")
  trainer checkpoint export runs/lora/version_0 adapter --peft           for PeftModel.from_pretrained
""",
    "import": """\
  trainer checkpoint import lightning_logs/version_0/checkpoints/last.ckpt imported
""",
}

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FILE_HELP = "a .ckpt file of Lightning's"
PATH_HELP = "a checkpoint, a run directory, its folder of checkpoints, or a folder of runs, at any depth"
ALL_OF_THEM, LAST_ONE = f"{PATH_HELP} (all of them)", f"{PATH_HELP} (the one that has written last)"
PATHS = {"ls": ALL_OF_THEM, "show": LAST_ONE, "verify": ALL_OF_THEM, "export": LAST_ONE, "import": FILE_HELP}
"""The help of the argument PATH of each subcommand."""


@reports_errors
def run(arguments: list[str]) -> int:
    """Run a subcommand. Returns the exit code: 1 for a damaged or missing checkpoint, 2 for wrong usage."""
    parser = _parser()
    if not arguments:
        print(parser.format_help(), end="", file=sys.stderr)
        return 2
    options = parser.parse(arguments)
    code: int = RUN[options.name](options)
    return code


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="trainer checkpoint",
        description="Look into checkpoints, without the code that wrote them.",
        epilog=f"examples:\n{''.join(EXAMPLES[name].splitlines(keepends=True)[0] for name in SUBCOMMANDS)}",
    )
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True, parser_class=CommandParser)
    of: dict[str, argparse.ArgumentParser] = {}
    for name, summary in SUBCOMMANDS.items():
        of[name] = commands.add_parser(
            name,
            aliases=["list"] if name == "ls" else [],
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"examples:\n{EXAMPLES[name]}",
        )
        of[name].add_argument("path", metavar="PATH", help=PATHS[name])
    for name, default in {"show": "last", "verify": "all of them", "export": "last"}.items():
        of[name].add_argument("--ckpt", metavar="NAME", help=f"last, best, or a name, of a run (default: {default})")
    for name in ("ls", "show"):
        of[name].add_argument("--json", action="store_true", help="print JSON")
    of["ls"].add_argument("--metric", metavar="NAME", action="append", default=[], help="show this logged value")
    of["ls"].add_argument("--verify", action="store_true", help="read the files completely; default: compare sizes")
    of["show"].add_argument("--all", action="store_true", help="list all tensors, not only the first of each file")
    _add_export_options(of["export"])
    of["import"].add_argument("out", metavar="OUT", help="the folder to write, for load_from_checkpoint")
    for name in ("export", "import"):
        of[name].add_argument("--force", action="store_true", help="replace OUT if it is there")
    return parser


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    words = "the file to write, or the folder, with --max-shard-size, --hf or --peft"
    parser.add_argument("out", metavar="OUT", help=words)
    parser.add_argument(
        "--hf",
        action="store_true",
        help="write a folder for from_pretrained: the Hugging Face model in the module by its own names, with its "
        "config.json, in files of at most --max-shard-size (default: 5GB)",
    )
    parser.add_argument(
        "--peft",
        action="store_true",
        help="write a folder for PeftModel.from_pretrained: the adapters (LoRA) that the checkpoint holds",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=size,
        help="write a folder of files of at most this size (5GB, 500MB), and their index, as Hugging Face's loaders "
        "read them",
    )
    parser.add_argument(
        "--dtype",
        type=lambda name: DTYPES.get(name, name),
        choices=tuple(DTYPES.values()),
        help="convert floating weights: float32, bfloat16 (or bf16), float16; default: as they are",
    )
    words = "write the average of the weights that EMAWeightAveraging or the like has kept"
    parser.add_argument("--ema", action="store_true", help=words)
    parser.add_argument("--prefix", help="only weights whose names begin so, named without it")
    parser.add_argument(
        "--rename",
        metavar="PATTERN=NAME",
        type=_rule,
        action="append",
        default=[],
        help="replace this regular expression in the names of weights, after --prefix; several are applied in order",
    )
    parser.add_argument("--expand-tied", action="store_true", help="write tied weights under every name")


def _rule(text: str) -> str:
    """Return a rule of `--rename`, PATTERN=NAME."""
    pattern, separator, replacement = text.partition("=")
    try:
        re.compile(f"{pattern}|").sub(replacement, "")
    except (re.error, IndexError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {pattern!r} is not a regular expression: {error}") from None
    if not separator or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r}: write PATTERN=NAME, as in '^layers=model.layers'")
    return text


def _ls(options: argparse.Namespace) -> int:
    from trainer.cli.checkpoint.find import checkpoint_folders, choose, is_one, leftover_names, listing, summarize
    from trainer.cli.checkpoint.report import as_data, plain, require_metrics, table_of

    if is_one(options.path):
        path = choose(options.path, None)
        found = {path.parent: [summarize(path, [], options.verify)]}
    else:
        found = {folder: listing(folder, options.verify) for folder in checkpoint_folders(options.path)}
    every = [one for rows in found.values() for one in rows]
    require_metrics(options.metric, every)
    if options.json:
        print(json.dumps([as_data(one) for one in every], indent=2))
        return 0
    for folder, rows in found.items():
        lines = [plain(str(folder)), *(table_of(rows, options.metric) if rows else ["  no checkpoint"])]
        left = leftover_names(folder)
        lines += [f"  {plain(name)}: being written, or left by a process that was killed" for name in left]
        print("\n".join(lines))
    return 0


def _show(options: argparse.Namespace) -> int:
    from trainer.checkpoint.manifest import read_manifest, read_metadata
    from trainer.cli.checkpoint.find import choose, summarize, written_at
    from trainer.cli.checkpoint.report import as_data, json_ready, page_of

    path = choose(options.path, options.ckpt)
    data = read_metadata(path)
    if options.json:
        print(json.dumps({**as_data(summarize(path, [], contents=False)), "data": json_ready(data)}, indent=2))
    else:
        print("\n".join(page_of(str(path), read_manifest(path), data, written_at(path), options.all)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from trainer.checkpoint.directory import POINTERS, CheckpointDirectory
    from trainer.checkpoint.manifest import verify_checkpoint
    from trainer.cli.checkpoint.find import checkpoint_folders, choose, is_one, listing, summarize
    from trainer.cli.checkpoint.report import plain
    from trainer.cli.checkpoint.report import size as readable

    paths, broken = [], []
    if options.ckpt is not None or is_one(options.path):
        paths = [choose(options.path, options.ckpt)]
    else:
        for folder in checkpoint_folders(options.path):
            paths += [one.path for one in listing(folder, contents=False)]
            store = CheckpointDirectory(folder)
            files = [folder / f"{name}.json" for name in POINTERS if store.pointer(name) is None]
            broken += [f"{file} points to no checkpoint" for file in files if file.exists()]
    intact = 0
    for path in paths:
        problems = verify_checkpoint(path)
        intact += not problems
        state = "DAMAGED" if problems else f"intact, {readable(summarize(path, [], False).bytes)}"
        print("\n  ".join([f"{plain(str(path))}: {state}", *map(plain, problems)]))
    print("\n".join([*map(plain, broken), f"{intact} of {len(paths)} checkpoints are intact"]))
    return int(intact < len(paths) or bool(broken) or not paths)


def _export(options: argparse.Namespace) -> int:
    from trainer.cli.checkpoint.export import export

    return export(options)


def _import(options: argparse.Namespace) -> int:
    from trainer.cli.checkpoint.from_lightning import import_lightning

    return import_lightning(options)


RUN = {"ls": _ls, "list": _ls, "show": _show, "verify": _verify, "export": _export, "import": _import}
