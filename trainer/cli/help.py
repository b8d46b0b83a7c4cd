"""`trainer help`: the help of a command, the dtypes of a precision, or the arguments of a class."""

from __future__ import annotations

from trainer.cli.columns import help_width, print_fitted
from trainer.cli.main import COMMANDS, dispatch
from trainer.cli.options import reports_errors
from trainer.config.plug_names import callbacks, optimizers, precisions, schedulers, strategies, strategy_classes
from trainer.errors import ConfigError, did_you_mean
from trainer.names.aliases import SHORT_PRECISIONS

HELP = """\
usage: trainer help [NAME]

Show the help of a command, or the arguments of a class.

NAME: a command; a callback, logger, strategy, precision, optimizer or scheduler; or a class of yours (file.py:Class).

examples:
  trainer help
  trainer help fit
  trainer help ModelCheckpoint
  trainer help fsdp
  trainer help torch.optim.lr_scheduler.StepLR
"""


@reports_errors
def run(arguments: list[str]) -> int:
    """Show the help of a name. Returns the exit code."""
    if not arguments:
        return dispatch(["--help"])
    if arguments[0] in ("-h", "--help"):
        print_fitted(HELP)
        return 0
    name = arguments[0]
    if name in COMMANDS:
        return dispatch([*arguments, "--help"])
    precision = SHORT_PRECISIONS.get(name, name)
    if precision in precisions():
        print_fitted(f"precision {precision}: {precisions()[precision]} (--trainer.precision {precision})")
        return 0
    if not {":", "."} & set(name) and name not in class_names():
        close = did_you_mean(name, [*COMMANDS, *precisions(), *class_names()])
        raise ConfigError(f"there is no command, precision or class {name!r}.{close} Or write file.py:Class.")
    from trainer.cli.class_help import class_help

    found = _classes().get(name)
    if found is None:
        cls = _own_class(name)
        found = cls, place_of(cls)
    print_fitted(class_help(*found, width=help_width()))
    return 0


def class_names() -> list[str]:
    """Return the short names of classes, without importing torch."""
    plugs = [*callbacks("Callback"), *callbacks("Logger"), *strategies(), *strategy_classes()]
    return sorted({*plugs, *optimizers(), *schedulers(), "Trainer"})


def _classes() -> dict[str, tuple[type, str]]:
    """Return the classes that have short names, and the places of their arguments."""
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from trainer.callback import available_callbacks
    from trainer.config.check import table_of
    from trainer.strategy import available_strategies
    from trainer.trainer import Trainer

    found: dict[str, tuple[type, str]] = {name: (cls, place_of(cls)) for name, cls in available_callbacks().items()}
    for name, strategy in available_strategies().items():
        found[name] = found[strategy.__name__] = (strategy, "trainer.strategy")
    found |= {name: (cls, "optimizer") for name, cls in table_of((Optimizer,)).items()}
    found |= {name: (cls, "lr_scheduler") for name, cls in table_of((LRScheduler,)).items()}
    return found | {"Trainer": (Trainer, "trainer")}


def place_of(cls: type) -> str:
    """Return the place in a configuration for objects of a class; empty if it has no place."""
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from trainer.callback import Callback
    from trainer.data.datamodule import DataModule
    from trainer.logger import Logger
    from trainer.module import TrainModule
    from trainer.strategy import Strategy

    places: dict[type, str] = {
        TrainModule: "module",
        DataModule: "data",
        Logger: "trainer.logger.N",
        Callback: "trainer.callbacks.N",
        Strategy: "trainer.strategy",
        Optimizer: "optimizer",
        LRScheduler: "lr_scheduler",
    }
    return next((place for base, place in places.items() if issubclass(cls, base)), "")


def _own_class(name: str) -> type:
    from trainer.config.classes import extend_sys_path, find_class
    from trainer.config.tree import COMMAND_LINE

    extend_sys_path([])
    cls: type = find_class(name, (object,), {}, COMMAND_LINE).cls
    return cls
