"""Exceptions whose messages name the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class TrainerError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(TrainerError, ValueError):
    """A user error. The message says what was given, what is allowed and what to type."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems) or [message]
        """The problems that the message lists, one by one."""


class NotRunningError(ConfigError, AttributeError):
    """An attribute of the trainer that exists from the first run on; `hasattr` returns False before."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be written or read. The message names the file or field."""


class MissingPackageError(TrainerError, ImportError):
    """An optional package is not installed. The message names the extra to install."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f'Install it with: pip install "exact-trainer[{extra}]"'
        )


RENAMED = {
    "StepTimes": "StragglerMonitor",
    "after_module": "runs_last",
    "asynchronous": "async_save",
    "most": "max_rows",
    "on_checkpoint_committed": "on_checkpoint_saved",
    "part_bytes": "max_shard_size",
    "resolved_config": "config_text",
    "warmup_steps": "compile_warmup_steps",
}
"""Names of earlier versions -> their current names."""


def did_you_mean(name: str, known: Iterable[str], equivalents: Mapping[str, str] | None = None) -> str:
    """Return `" Did you mean 'ddp'?"`, or an empty string when nothing known is close to `name`.

    Args:
        equivalents: names of other trainers -> the text after "Use", as in `" Use 'ddp'."`.
    """
    if equivalents is not None and name in equivalents:
        return f" Use {equivalents[name]}."
    by_lower = {candidate.lower(): candidate for candidate in known}
    if RENAMED.get(name, "").lower() in by_lower:
        return f" It is called {RENAMED[name]!r} now."
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def unknown_name_error(
    kind: str, name: object, known: Iterable[str], equivalents: Mapping[str, str] | None = None
) -> ConfigError:
    """Return the error for a name that is not in a table. `equivalents` as in `did_you_mean`.

    >>> str(unknown_name_error("strategy", "dpd", ["ddp", "single_device"]))
    "unknown strategy 'dpd'. Did you mean 'ddp'? Known: ddp, single_device."
    """
    names = sorted(known)
    return ConfigError(
        f"unknown {kind} {name!r}.{did_you_mean(str(name), names, equivalents)} Known: {', '.join(names)}."
    )


def raise_problems(problems: list[str], subject: str) -> None:
    """Raise one `ConfigError` that lists every problem; do nothing when there is none."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in {subject}:\n{lines}", problems)


TORCH_ERRORS = {
    "Expected to have finished reduction in the prior iteration": (
        "Parameters took no part in the loss of a step. Use strategy=DDPStrategy(find_unused_parameters=True) from "
        "trainer.strategies, or remove them (TORCH_DISTRIBUTED_DEBUG=DETAIL names them)."
    ),
    "backward through the graph a second time": (
        "The trainer calls backward for you: training_step returns the loss and calls no backward. If it did not, then "
        "a tensor of an earlier step is still in use: detach() it. With automatic_optimization = False call "
        "self.manual_backward once for each graph: add losses that share one."
    ),
    "optimizer got an empty parameter list": (
        "configure_optimizers gave an optimizer nothing to train: the module has no parameters there. Make layers "
        "attributes of the module; in a plain list or dict they are not found, use nn.ModuleList or nn.ModuleDict."
    ),
    "got mixed torch.Tensor and DTensor": (
        "A sharded parameter was used outside of the forward of the layer that gathers it. Call that layer, instead of "
        "using its weight; or use strategy 'ddp'."
    ),
    "must have the same dtype": (
        "Weights and data differ in dtype. Give the data as float32 (batch.float()), or choose the dtype of both with "
        "Trainer(precision=...)."
    ),
    "Expected more than 1 value per channel when training": (
        "A batch has one sample, with which BatchNorm cannot train: the last batch of an epoch, or a process's part of "
        "it. Use DataLoader(drop_last=True), or another batch_size."
    ),
    "Inference tensors cannot be saved for backward": (
        "A tensor made in validation or test is used in training. Use Trainer(inference_mode=False), or clone() it."
    ),
    "Inplace update to inference tensor outside InferenceMode": (
        "A tensor made in validation or test is changed in training. Use Trainer(inference_mode=False), or clone() it."
    ),
    "Unable to find address for: ": (
        "GLOO_SOCKET_IFNAME names the network interface over which the processes talk, and this "
        "machine has none of that name: `ip link` lists them."
    ),
    "does not have a deterministic implementation": ("Use Trainer(deterministic='warn'), or avoid that operation."),
    "Expected all tensors to be on the same device": (
        "The trainer moves the module and its batches. Register other tensors with self.register_buffer, or create "
        "them with device=self.device."
    ),
}
"""Substring of torch's message -> advice."""


def explain_torch_error(error: BaseException) -> ConfigError | None:
    """Return a `ConfigError` with advice, whose cause is `error`; None if there is no advice for `error`."""
    if isinstance(error, TrainerError) or not isinstance(error, (RuntimeError, ValueError)):
        return None
    text = str(error)
    for part, advice in TORCH_ERRORS.items():
        if part in text:
            explained = ConfigError(f"{advice}\ntorch said: {text.splitlines()[0]}")
            explained.__cause__ = error
            return explained
    return None
