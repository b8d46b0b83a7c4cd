"""Translate another program's configuration, and account for each of its keys."""

from __future__ import annotations

from trainer.arguments import local_path
from trainer.cli.config.from_accelerate import from_accelerate
from trainer.cli.config.from_deepspeed import from_deepspeed, set_strategy
from trainer.cli.config.report import MigrationReport, read_plain
from trainer.errors import ConfigError


def translate(name: str) -> MigrationReport:
    """Read a file of another program.

    Raises:
        ConfigError: the file cannot be read, or has no known format.
    """
    path = local_path(name)
    given, kind = read_plain(path)
    if kind is None:
        raise ConfigError(
            f"{name} is neither an Accelerate configuration (with distributed_type) nor a DeepSpeed one (with "
            "zero_optimization). A configuration of ours goes to trainer fit --config as it is."
        )
    report = MigrationReport(path, kind)
    if "DeepSpeed" in kind:
        from_deepspeed(report, given)
        set_strategy(report)
    else:
        from_accelerate(report, given)
    return report
