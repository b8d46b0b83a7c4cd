"""`trainer checkpoint`: what is in a run directory, what a checkpoint holds, whether it is whole, its weights alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.main import refuse
from trainer.cli.options import ErrorParser

if TYPE_CHECKING:
    import torch

VERBS = {
    "ls": "list the checkpoints of a run",
    "show": "show what is in a checkpoint",
    "verify": "read checkpoints whole and compare every file with its checksum",
    "export": "write the weights alone to one safetensors file",
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
  trainer checkpoint verify runs/digits/version_0 --ckpt last && echo whole
""",
    "export": """\
  trainer checkpoint export runs/digits/version_0 digits.safetensors --ckpt best
  trainer checkpoint export runs/gpt/version_0 gpt.safetensors --prefix model. --expand-tied
""",
}

PATH_HELP = "a checkpoint, a run directory, its folder of checkpoints, or a folder of runs (the newest is meant)"


def run(arguments: list[str]) -> int:
    """Do what the arguments say. Returns the exit code: 1 for a damaged checkpoint or one that is not there."""
    from trainer.errors import ConfigError, TrainerError

    parser = _parser()
    if not arguments:
        print(parser.format_help(), end="", file=sys.stderr)
        return 2
    try:
        options = parser.parse_args(arguments)
        code: int = {"ls": _ls, "show": _show, "verify": _verify, "export": _export}[options.verb](options)
    except SystemExit as end:  # of --help
        return int(end.code or 0)
    except ConfigError as error:
        return refuse(str(error))
    except TrainerError as error:
        refuse(str(error))
        return 1
    except BrokenPipeError:  # of `trainer checkpoint show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = ErrorParser(
        prog="trainer checkpoint",
        description="Look into checkpoints, without the code that wrote them.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True, parser_class=ErrorParser)
    of: dict[str, argparse.ArgumentParser] = {}
    for verb, summary in VERBS.items():
        of[verb] = commands.add_parser(
            verb,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"examples:\n{EXAMPLES[verb]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        of[verb].add_argument("path", metavar="PATH", help=PATH_HELP)
    for verb in ("show", "verify", "export"):
        default = "all of them" if verb == "verify" else "last"
        of[verb].add_argument("--ckpt", metavar="NAME", help=f"last, best, or a name, of a run (default: {default})")
    for verb in ("ls", "show"):
        of[verb].add_argument("--json", action="store_true", help="print JSON")
    of["ls"].add_argument("--metric", metavar="NAME", action="append", default=[], help="show this logged value")
    of["ls"].add_argument("--verify", action="store_true", help="read the files whole; else only sizes are compared")
    of["show"].add_argument("--all", action="store_true", help="list all tensors, not only the first of each file")
    of["export"].add_argument("out", metavar="OUT.safetensors", help="the file to write")
    of["export"].add_argument("--prefix", help="only weights whose names begin so, named without it")
    of["export"].add_argument("--expand-tied", action="store_true", help="write tied weights under every name")
    of["export"].add_argument("--force", action="store_true", help="replace OUT.safetensors if it is there")
    return parser


def _ls(options: argparse.Namespace) -> int:
    from trainer.checkpoint.format import is_committed
    from trainer.checkpoint.place import place_of
    from trainer.cli.checkpoint_find import checkpoint_folders, leftover_names, listing, look
    from trainer.cli.checkpoint_text import as_data, plain, table_of

    if is_committed(place_of(options.path)):
        found = {"": [look(place_of(options.path), [], options.verify)]}
    else:
        found = {str(folder): listing(folder, options.verify) for folder in checkpoint_folders(options.path)}
    if options.json:
        print(json.dumps([as_data(one) for rows in found.values() for one in rows], indent=2))
        return 0
    for folder, rows in found.items():
        if folder:
            print(plain(folder))
        print("\n".join(table_of(rows, options.metric)) if rows else "  no checkpoint")
        for name in leftover_names(place_of(folder)) if folder else ():
            print(f"  {plain(name)}: being written, or left by a process that was killed")
    return 0


def _show(options: argparse.Namespace) -> int:
    from trainer.checkpoint.format import read_manifest, read_metadata
    from trainer.cli.checkpoint_find import choose, look, written_at
    from trainer.cli.checkpoint_text import as_data, json_ready, page_of

    path = choose(options.path, options.ckpt)
    data = read_metadata(path)
    if options.json:
        print(json.dumps({**as_data(look(path, [], contents=False)), "data": json_ready(data)}, indent=2))
    else:
        print("\n".join(page_of(str(path), read_manifest(path), data, written_at(path), options.all)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from trainer.checkpoint.format import is_committed, verify_checkpoint
    from trainer.checkpoint.place import place_of
    from trainer.checkpoint.store import POINTERS, CheckpointStore
    from trainer.cli.checkpoint_find import checkpoint_folders, choose, listing, look
    from trainer.cli.checkpoint_text import plain, size

    pointers = []
    if options.ckpt is not None or is_committed(place_of(options.path)):
        paths = [choose(options.path, options.ckpt)]
    else:
        folders = checkpoint_folders(options.path)
        paths = [one.path for folder in folders for one in listing(folder, contents=False)]
        pointers = [
            f"{folder / f'{name}.json'} points to no checkpoint"
            for folder in folders
            for name in POINTERS
            if (folder / f"{name}.json").exists() and CheckpointStore(folder).pointer(name) is None
        ]
    broken = 0
    for path in paths:
        problems = verify_checkpoint(path)
        broken += bool(problems)
        print(f"{plain(str(path))}: {'DAMAGED' if problems else f'whole, {size(look(path, [], False).bytes)}'}")
        for problem in problems:
            print(f"  {plain(problem)}")
    for problem in pointers:
        print(plain(problem))
    if len(paths) != 1:
        print(f"{len(paths) - broken} of {len(paths)} checkpoints are whole")
    return 1 if broken or pointers or not paths else 0


def _export(options: argparse.Namespace) -> int:
    from trainer.checkpoint.format import read_checkpoint
    from trainer.cli.checkpoint_find import choose
    from trainer.cli.checkpoint_text import plain, size
    from trainer.errors import ConfigError

    out = Path(options.out)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: give the name of a file, such as {out / 'model.safetensors'}.")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}: make it first, or write somewhere else.")
    if out.exists() and not options.force:
        raise ConfigError(f"{out} exists: give another name, or --force to replace it.")
    path = choose(options.path, options.ckpt)
    state = read_checkpoint(path, keys=["model"])["model"]
    weights, notes = _weights(state, options.prefix or "", options.expand_tied)
    written = _write(out, weights)
    for note in notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    print(f"{out}: {len(weights)} tensors, {size(written)}, of {plain(str(path))}")
    return 0


def _weights(state: Any, prefix: str, expand_tied: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What is written, by name; and what is left out, or looks different in the file."""
    import torch

    from trainer.checkpoint.tensorfile import is_native
    from trainer.errors import CheckpointError, ConfigError, did_you_mean

    if not isinstance(state, dict):
        raise CheckpointError("its 'model' is not a state_dict: it was not written by a Trainer.")
    weights: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    notes = []
    for name, value in state.items():
        if not isinstance(name, str) or not name.startswith(prefix):
            continue
        short = name[len(prefix) :]
        if not isinstance(value, torch.Tensor) or not short:
            notes.append(f"{name!r} is no tensor with a name, and is left out")
        elif id(value) in first_name and not expand_tied:
            notes.append(f"{name!r} is tied to {first_name[id(value)]!r} and written once; --expand-tied writes both")
        else:
            first_name.setdefault(id(value), name)
            weights[short] = value
            if not is_native(value.dtype):
                notes.append(f"{name!r} is {value.dtype}, which safetensors lacks: its bytes are written, as uint8")
    if not weights:
        heads = sorted({f"{name.split('.')[0]}." for name in state if isinstance(name, str) and "." in name})
        raise ConfigError(
            f"no weight's name begins with {prefix!r}.{did_you_mean(prefix, heads)} There are: {', '.join(heads)}."
        )
    return weights, notes


def _write(out: Path, weights: dict[str, torch.Tensor]) -> int:
    """Write beside `out`, and rename when all is on the disk. Returns the size."""
    from trainer.checkpoint.disk import sync_folder, temporary_beside, write_file
    from trainer.checkpoint.tensorfile import file_chunks
    from trainer.errors import CheckpointError

    temporary = temporary_beside(out)
    try:
        entry = write_file(temporary, file_chunks(weights))
        os.replace(temporary, out)
        sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}. Nothing was changed.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return entry.bytes
