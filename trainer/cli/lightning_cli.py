"""`LightningCLI`: the command line of a script, as in Lightning, over the commands of this package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from trainer.callback import Callback
from trainer.cli.main import usage_error
from trainer.cli.migrate.yaml_files import migrate_yaml
from trainer.cli.run import Job, run_command
from trainer.config.check import Checker
from trainer.config.files import as_node, plain_value, read_tree
from trainer.config.loading import Recipe, load
from trainer.config.read import read
from trainer.config.specs import ClassSpec
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node, entries, from_override
from trainer.config.types import constructor_parameters
from trainer.errors import ConfigError
from trainer.hyperparameters import Hyperparameters
from trainer.settings import Settings
from trainer.trainer import Trainer

SUBCOMMANDS = ("fit", "validate", "test", "predict")
KEYS = {"model": "module", "seed_everything": "trainer.seed"}
"""Keys of LightningCLI -> the names here."""
HARMLESS = ("description", "error_handler", "parser_mode")
"""Arguments of jsonargparse's parser that change nothing here."""
SEEDS = {"True": 0, "False": None}
"""Values of `seed_everything` that are not numbers -> the seed."""


class LightningArgumentParser(argparse.ArgumentParser):
    """The additions of a script to its command line: options that it reads itself, callbacks, defaults and links."""

    def __init__(self) -> None:
        super().__init__(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
        self.register("type", bool, plain_value)
        self.own: dict[str, Any] = {}
        """The script's own options, with their defaults."""
        self.callbacks: dict[str, type[Callback]] = {}
        self.defaults: dict[str, Any] = {}
        self.links: dict[str, str] = {}

    def add_argument(self, *names: Any, default: Any = None, **options: Any) -> argparse.Action:
        """Add an option whose value is in `cli.config`."""
        action = super().add_argument(*names, default=argparse.SUPPRESS, **options)
        self.own[action.dest] = default
        return action

    def add_lightning_class_args(self, lightning_class: type[Callback], nested_key: str, **options: Any) -> None:
        """Add a callback to the trainer. Its arguments are those below `nested_key`."""
        self.callbacks[nested_key] = lightning_class
        self.defaults[nested_key] = {}

    def add_optimizer_args(self, cls: Any = (), nested_key: str = "optimizer", **options: Any) -> None:
        """Let the configuration choose the optimizer, as it may anyway. A single class is the default."""
        self.defaults |= {nested_key: path_of(cls)} if isinstance(cls, type) else {}

    def add_lr_scheduler_args(self, cls: Any = (), nested_key: str = "lr_scheduler", **options: Any) -> None:
        """Let the configuration choose the scheduler, as it may anyway. A single class is the default."""
        self.add_optimizer_args(cls, nested_key)

    def set_defaults(self, *defaults: Mapping[str, Any], **more: Any) -> None:
        """Set defaults by their names on the command line."""
        self.defaults.update(*defaults, **more)

    def link_arguments(self, source: str, target: str, compute_fn: Any = None, apply_on: str = "parse") -> None:
        """Give `target` the value of `source`, which may be an attribute of the data module."""
        if compute_fn is not None:
            words = "link a property of the data module instead, or compute the value in the constructor"
            raise ConfigError(f"link_arguments({source!r}, {target!r}, compute_fn=): {words}.")
        self.links[target] = source


class LightningCLI:
    """The command line of a script: `script.py fit --config run.yaml --model.lr 0.1`.

    Files have the keys of LightningCLI or of `trainer fit`. A subclass may define `add_arguments_to_parser(parser)`,
    `before_instantiate_classes`, `after_instantiate_classes`, `before_fit`, `after_fit`, and the like for other
    commands. `model`, `datamodule`, `trainer` and `config` are what was made and read.

    Args:
        model_class, datamodule_class: the classes. None: the configuration names them.
        save_config_callback, save_config_kwargs: None; not used. The run directory has `config.yaml`.
        trainer_class: the class of the Trainer, or a function that makes it.
        trainer_defaults: defaults of its arguments. Callbacks are added to those of the configuration.
        seed_everything_default: the seed. True: 0. False: none.
        parser_kwargs, parser_class, auto_configure_optimizers, load_from_checkpoint_support: not used.
        subclass_mode_model, subclass_mode_data: the configuration names the class.
        args: words in place of the command line.
        run: False: there is no command; the objects are made, and the script uses them.
    """

    def __init__(
        self,
        model_class: type | None = None,
        datamodule_class: type | None = None,
        save_config_callback: Any = None,
        save_config_kwargs: Any = None,
        trainer_class: Callable[..., Trainer] = Trainer,
        trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: Any = None,
        parser_class: Any = None,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: list[str] | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        _refuse({**(parser_kwargs or {}), "parser_class": parser_class, "save_config_callback": save_config_callback})
        self._trainer_class, self._trainer_defaults = trainer_class, dict(trainer_defaults or {})
        self.parser = LightningArgumentParser()
        for name in [name for name, value in self._trainer_defaults.items() if isinstance(value, dict)]:
            self.parser.defaults[f"trainer.{name}"] = self._trainer_defaults.pop(name)
        classes = {"model": model_class, "data": datamodule_class}
        chosen = {"model": subclass_mode_model, "data": subclass_mode_data}
        fixed = {key: path_of(cls) for key, cls in classes.items() if cls is not None and not chosen[key]}
        self.parser.set_defaults(seed_everything=seed_everything_default, **fixed)
        self.add_arguments_to_parser(self.parser)
        words = [*(sys.argv[1:] if args is None else args)]
        self.subcommand = words.pop(0) if run and words else None
        if run and self.subcommand not in SUBCOMMANDS:
            sys.exit(usage_error(f"given {self.subcommand!r}, but the first word is {' or '.join(SUBCOMMANDS)}."))
        self._typed, rest = self.parser.parse_known_args(words)
        code = run_command(self.subcommand or "fit", rest, self.parser.format_help(), self._run, self._read)
        if code or not hasattr(self, "trainer"):  # after --help and --print_config
            sys.exit(code)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add options, callbacks, defaults and links."""

    def before_instantiate_classes(self) -> None:
        """Act before the objects are made."""

    def after_instantiate_classes(self) -> None:
        """Act before the command runs."""

    def _read(self, files: list[str], overrides: list[tuple[str, Node]], findings: Diagnostics, command: str) -> Recipe:
        """Return the configuration that files and command line give, over the script's defaults."""
        parts = [*entries(as_node(self.parser.defaults, COMMAND_LINE)).items()]
        for file in files:
            given = entries(read_tree(file, findings, lambda text: migrate_yaml(text, of_cli=True)[0]))
            parts += (entries(given.get(command)) or given).items()
        parts += sorted(overrides, key=lambda part: part[0].count("."))
        parts += [(target, Node(f"${{{self._here(of)}}}", COMMAND_LINE)) for target, of in self.parser.links.items()]
        trees = [entries(from_override(self._here(name), node)) for name, node in parts]
        tree = read([], [part for one in trees for part in one.items()], findings)
        seed, own = entries(entries(tree)["trainer"])["seed"], entries(entries(tree).get("vars"))
        seed.value = SEEDS.get(str(seed.value), seed.value)
        recipe = load(tree, findings, command)
        checker, classes = Checker(findings), self.parser.callbacks
        callbacks = [checker.spec_of(classes[key], own[key], (key,), COMMAND_LINE, COMMAND_LINE) for key in classes]
        findings.report()
        self._complete(recipe, callbacks, {name: node.plain() for name, node in own.items()})
        self.before_instantiate_classes()
        return recipe

    def _here(self, name: str) -> str:
        """Return the name here of a name of LightningCLI, perhaps with dots; the script's own are below `vars`."""
        root, dot, rest = name.partition(".")
        own = {*self.parser.own, *self.parser.callbacks}
        return (f"vars.{root}" if root in own else KEYS.get(root, root)) + dot + rest

    def _complete(self, recipe: Recipe, callbacks: list[Any], own: dict[str, Any]) -> None:
        """Add what the script gives in Python, and keep the configuration in `config` with the keys of LightningCLI."""
        always = self._trainer_defaults.get("callbacks") or []
        callbacks += always if isinstance(always, list) else [always]
        callbacks = [*(recipe.trainer.get("callbacks") or []), *callbacks]
        recipe.trainer = {**self._trainer_defaults, **recipe.trainer, "callbacks": callbacks}
        recipe.trainer_class = self._trainer_class
        # `trainer validate` finds the classes of the script by its file.
        file = os.path.abspath(vars(sys.modules["__main__"]).get("__file__", ""))
        recipe.recorded = recipe.recorded.replace(f"{os.path.dirname(file)}:__main__.", f"{file}:")

        trainer = Hyperparameters({field.name: field.default for field in fields(Settings)} | recipe.trainer)
        config = Hyperparameters(seed_everything=trainer.pop("seed"), trainer=trainer, ckpt_path=recipe.ckpt_path)
        config |= self.parser.own | own | vars(self._typed)
        config.model, config.data = _arguments(recipe.module), recipe.data and _arguments(recipe.data)
        self.config = config if self.subcommand is None else Hyperparameters({self.subcommand: config})

    def _run(self, job: Job) -> None:
        """Run the command on the objects, between a subclass's methods before and after it."""
        self.trainer, self.model, self.datamodule = job.trainer, job.module, job.data
        self.after_instantiate_classes()
        if self.subcommand is not None:
            getattr(self, f"before_{self.subcommand}", _nothing)()
            act = getattr(self, self.subcommand, getattr(job.trainer, self.subcommand))
            act(job.module, datamodule=job.data, ckpt_path=job.ckpt_path)
            getattr(self, f"after_{self.subcommand}", _nothing)()


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise for options of Lightning's that cannot be used, and would change something."""
    if wrong := [name for name, value in options.items() if value is not None and name not in HARMLESS]:
        raise ConfigError(
            f"LightningCLI cannot use {wrong[0]}: give files with --config, and callbacks in trainer_defaults."
        )


def path_of(cls: type) -> str:
    """Return the path by which a configuration names a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _arguments(spec: ClassSpec) -> Hyperparameters:
    """Return the arguments of a class, with its defaults."""
    defaults = {name: one.default for name, one in constructor_parameters(spec.cls).named.items()}
    return Hyperparameters(defaults | spec.arguments)


def _nothing() -> None: ...
