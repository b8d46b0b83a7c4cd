"""`trainer init`: start a project from a copy of an example: module, data, configuration, README and test."""

from __future__ import annotations

import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

from trainer.arguments import local_path
from trainer.cli.columns import print_fitted
from trainer.cli.options import CommandParser, reports_errors
from trainer.errors import ConfigError, unknown_name_error

TEMPLATES = {
    "digits": "classifies handwritten digits: a convolutional net on small images",
    "gpt": "a small GPT on Python's own library, or on text files of yours",
    "text-classification": "classifies texts: docstrings by their package, or a CSV file of yours",
    "bert": "classifies texts with a BERT of transformers, from scratch or fine-tuned",
    "vit": "classifies images with a ViT of transformers, from scratch or fine-tuned",
    "causal-lm": "a Llama of transformers on Python's own library, and adapters (LoRA) on it",
    "gan": "invents digits: manual optimization with two optimizers",
}
"""Examples that are copied: folder and description."""
NEEDS = {
    "digits": {"sklearn": "scikit-learn", "torchmetrics": "torchmetrics", "tensorboard": "tensorboard"},
    "gan": {"sklearn": "scikit-learn"},
    "causal-lm": {"transformers": "transformers", "peft": "peft"},
    "bert": {"transformers": "transformers"},
    "vit": {"transformers": "transformers", "sklearn": "scikit-learn", "PIL": "pillow"},
}
"""Packages that an example imports beyond our own dependencies: module and name."""
FOLDER = Path(__file__).resolve().parent.parent / "examples"

EXAMPLES = """\
examples:
  trainer init --template digits my_digits
  cd my_digits
  trainer fit --config config.yaml
  pytest
"""


@reports_errors
def run(arguments: list[str]) -> int:
    """Copy an example into a new folder. Returns the exit code: 2 when nothing was written."""
    options = _parser().parse(arguments)
    if options.list:
        print_fitted("".join(f"{name:<21}{words}\n" for name, words in TEMPLATES.items()))
    else:
        _write(options.template, options.folder)
    return 0


def _parser() -> CommandParser:
    templates = "\n".join(f"  {name:<21}{words}" for name, words in TEMPLATES.items())
    parser = CommandParser(
        prog="trainer init",
        usage="trainer init --template NAME DIR",
        description="Begin a project: a folder with a module, its data, a configuration, a README and a test.",
        epilog=f"templates:\n{templates}\n\n{EXAMPLES}",
    )
    parser.add_argument("folder", metavar="DIR", nargs="?", help="a new folder, or an empty one")
    parser.add_argument("--template", metavar="NAME", help="which project, see below")
    parser.add_argument("--list", action="store_true", help="list the templates, write nothing")
    return parser


def _write(template: str | None, folder: str | None) -> None:
    if template is None or folder is None:
        raise ConfigError("give both: trainer init --template digits my_digits. See trainer init --list.")
    if template not in TEMPLATES:
        raise unknown_name_error("template", template, TEMPLATES)
    target = local_path(folder)
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{folder} is not empty, and nothing in it is replaced: give the name of a new folder.")
    try:
        leave = shutil.ignore_patterns("__pycache__", "runs", ".*")
        shutil.copytree(FOLDER / template, target, dirs_exist_ok=True, ignore=leave, copy_function=shutil.copyfile)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}.") from error
    files = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    print(f"{folder}: {', '.join(files)}\n\n  cd {shlex.quote(folder)}\n  trainer fit --config config.yaml\n  pytest")
    needed = {**NEEDS.get(template, {}), "pytest": "pytest"}
    absent = [package for module, package in needed.items() if find_spec(module) is None]
    if absent:
        print(f"\nIt needs packages that are not installed: pip install {' '.join(absent)}")
