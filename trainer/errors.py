"""Exceptions whose messages name the fix."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dis import opmap
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def printable(text: str) -> str:
    """Escape the characters that a terminal would interpret, except line ends: names may come from a stranger."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


LONGEST = 2000
"""Maximum characters of one problem in a message; the middle of a longer one is cut out."""
MOST = 30
"""Maximum number of problems that one message lists."""


def shortened(text: str, maximum: int = LONGEST) -> str:
    """Return a text of at most `maximum` characters: its middle is cut out, because messages end with the fix."""
    return text if len(text) <= maximum else f"{text[: maximum * 2 // 3]} [...] {text[-maximum // 3 :]}"


def shown(value: object) -> str:
    """Return the repr of a value for a message."""
    return shortened(repr(value), 200)


class TrainerError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(TrainerError, ValueError):
    """A user error. The message says what was given, what is allowed and what to type."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        self.problems = list(problems) or [message]
        super().__init__(printable(message if problems else shortened(message)))
        """The problems that the message lists, one by one."""


class NotRunningError(ConfigError, AttributeError):
    """An attribute of the trainer that exists from the first run on; `hasattr` returns False before."""


class ArgumentError(ConfigError, TypeError):
    """An argument that a constructor or method does not take."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be written or read. The message names the file or field."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Raise errors of the block as a CheckpointError that names the state that was being restored."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        reason = shortened(str(error), 500)
        raise CheckpointError(
            f"{what} cannot be restored from the checkpoint ({type(error).__name__}: {reason}). Either it was written "
            "by other code, or it is damaged."
        ) from error


OPTIONAL_PACKAGES = {
    "deepspeed": "deepspeed>=0.19",
    "libcst": "libcst>=1.5",
    "matplotlib": "matplotlib>=3.8",
    "mlflow": "mlflow>=2.14",
    "onnxscript": "onnxscript>=0.5",
    "psutil": "psutil>=5.9",
    "ray": "ray[train]>=2.51",
    "rich": "rich>=13.0",
    "tensorboard": "tensorboard>=2.16.2",
    "torchao": "torchao>=0.18",
    "torchmetrics": "torchmetrics>=1.6.2",
    "wandb": "wandb>=0.20",
}
"""The optional packages as pip has to be given them. Messages name no extra of this package, because
anybody could register a name that is not on the package index yet."""


def install_command(package: str) -> str:
    """Return the command that installs an optional package."""
    return f'pip install "{OPTIONAL_PACKAGES[package]}"'


OTHER_NAMES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Modules -> the packages that have them, where the names differ."""


def missing_package_advice(error: BaseException) -> str:
    """Return a sentence with what to install if a user's import failed because a package is not; else nothing."""
    # Of a module that is missing in an installed package, the name has a dot.
    if not isinstance(error, ModuleNotFoundError) or not error.name or "." in error.name:
        return ""
    if error.name in OPTIONAL_PACKAGES:
        return f" Install it with: {install_command(error.name)}"
    return f" If it is a package, install it: pip install {OTHER_NAMES.get(error.name, error.name)}"


class MissingPackageError(TrainerError, ImportError):
    """Raised when an optional package is not installed; the message has the command that installs it."""

    def __init__(self, package: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f"Install it with: {install_command(package)}"
        )


def refuse_other_package(package: ModuleType) -> None:
    """Raise an ImportError if the package `trainer` is the user's own, or another distribution's.

    A distribution may be installed over ours, or have gone with it. Called by the command, and by those packages that
    have the name of a module that such a distribution imports first.
    """
    if "TrainModule" in getattr(package, "__all__", ()):
        return
    folder = Path(package.__path__[0])
    if folder != Path(__file__).parent and folder.parent.name not in ("site-packages", "dist-packages"):
        raise ImportError(
            f"Python takes the folder {folder} for this package: give it another name, or type the command in another "
            "folder than the one it is in."
        )
    raise ImportError(
        f"another distribution with the import name 'trainer' is, or was, installed over this one in {folder}. "
        "Uninstall both (pip uninstall trainer coqui-tts-trainer exact-trainer), and install this one again."
    )


def require_package(package: str, needed_for: str) -> None:
    """Raise a MissingPackageError unless an optional package is installed."""
    if find_spec(package) is None:
        raise MissingPackageError(package, needed_for)


def did_you_mean(name: str, known: Iterable[str], equivalents: Mapping[str, str] | None = None) -> str:
    """Return `" Did you mean 'ddp'?"`, or an empty string when nothing known is close to `name`.

    Args:
        equivalents: names of other trainers -> the text after "Use", as in `" Use 'ddp'."`.
    """
    if equivalents is not None and name in equivalents:
        return f" Use {equivalents[name]}."
    if len(name) > 200:
        return ""
    by_lower = {candidate.lower(): candidate for candidate in known}
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
    listed = f" Known: {', '.join(names)}." if names else ""
    return ConfigError(f"unknown {kind} {name!r}.{did_you_mean(str(name), names, equivalents)}{listed}")


def public_names(package: ModuleType) -> list[str]:
    """Return the names that an error lists for a package: its `__all__`, or else what can be called in it."""
    public = [one for one, value in vars(package).items() if callable(value) and not one.startswith("_")]
    return [*vars(package).get("__all__", public)]


def no_such_name(package: ModuleType, name: str, instead: str = "", depth: int = 2) -> AttributeError | ImportError:
    """Return the error that `__getattr__` of a package raises for an unknown name.

    Args:
        instead: what to use instead.
        depth: number of calls between the import system, or whoever else asks, and this function.

    An AttributeError, on which `hasattr`, `pickle` and `inspect` rely; but in `from package import name`, where Python
    would replace it and its message, an ImportError.
    """
    equivalents = {name: instead} if instead else None
    text = str(unknown_name_error(f"name in {package.__name__}:", name, public_names(package), equivalents))
    caller = sys._getframe(depth)  # Python's import system asks for an attribute, and then for a submodule
    in_import = caller.f_code.co_name == "_handle_fromlist" and caller.f_globals["__name__"] == "importlib._bootstrap"
    if not hasattr(package, "__path__"):  # a module without further ones: the importing code itself asks
        in_import = caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
    elif in_import:
        in_import = find_spec(f"{package.__name__}.{name}") is None
    if in_import and (instead or not name.startswith("__")):
        return ImportError(text, name=package.__name__, path=vars(package).get("__file__"))
    return AttributeError(text)


def first_of(items: Iterable[object], maximum: int = 3) -> str:
    """Return the first of some names, and the number of the others.

    >>> first_of("abcde")
    'a, b, c and 2 more'
    """
    texts = [*map(str, items)]
    return ", ".join(texts[:maximum]) + (f" and {len(texts) - maximum} more" if len(texts) > maximum else "")


def format_ranks(ranks: Collection[int]) -> str:
    """Return `rank 3` or `ranks 0, 1, 5`, of many the first."""
    return f"rank{'s' if len(ranks) > 1 else ''} {first_of(ranks, 8)}"


def problems_found(*checks: tuple[object, str]) -> list[str]:
    """Return the sentences of the checks that have found something."""
    return [sentence for found, sentence in checks if found]


def raise_problems(problems: list[str], subject: str, cause: Exception | None = None) -> None:
    """Raise one `ConfigError` that lists every problem, from its `cause`; do nothing when there is none."""
    if len(problems) == 1:
        raise ConfigError(problems[0]) from cause
    if problems:
        more = [f"and {len(problems) - MOST} more"] if len(problems) > MOST else []
        lines = "\n".join(f"  - {shortened(problem, LONGEST // 4)}" for problem in [*problems[:MOST], *more])
        raise ConfigError(f"{len(problems)} problems in {subject}:\n{lines}", problems) from cause


INSTEAD_OF_PENALTIES = (
    "For a penalty of weights use AdamW's weight_decay, strategy 'ddp', or p.grad.add_(p.detach(), alpha=2 * factor) "
    "in on_before_optimizer_step."
)
"""Words for what cannot be computed of shards within a step."""

TORCH_ERRORS = {
    "Expected to have finished reduction in the prior iteration": (
        "Parameters took no part in the loss of a step. Use strategy=DDPStrategy(find_unused_parameters=True) from "
        "trainer.strategies, or remove them (TORCH_DISTRIBUTED_DEBUG=DETAIL names them)."
    ),
    "backward through the graph a second time": (
        "The trainer calls backward for you: training_step only returns the loss, computed from tensors of this step "
        "alone. With automatic_optimization = False, add losses that share a graph and call self.manual_backward once."
    ),
    "optimizer got an empty parameter list": (
        "configure_optimizers gave an optimizer nothing to train: its parameters are frozen, or were not found. Make "
        "layers attributes of the module, in nn.ModuleList or nn.ModuleDict instead of a plain list or dict."
    ),
    "got mixed torch.Tensor and DTensor": (
        "A sharded parameter was used outside of the forward of the layer that gathers it. Call that layer, instead of "
        f"using its weight. {INSTEAD_OF_PENALTIES}"
    ),
    "specified for input.numel() == 0": (
        "max or min of a tensor without elements: under 'fsdp' a process may hold no part of a small parameter. Call "
        "p.grad.full_tensor().abs().max() on all processes, or use p.grad.square().sum()."
    ),
    "has been modified by an inplace operation": (
        "A weight or another tensor of a forward was changed before its backward. Change weights between two steps, in "
        "a hook such as on_train_batch_end; elsewhere write x = x + y instead of x += y."
    ),
    "a leaf Variable that requires grad is being used in an in-place operation": (
        "A parameter, or another leaf, is changed in place: do that in `with torch.no_grad():`. For gradients of "
        "gradients under 'ddp' use torch.autograd.grad(loss, inputs, create_graph=True), and call backward once."
    ),
    "This view was created inside a custom Function": (
        "A tensor is changed in place where torch cannot follow: an argument of a block that 'fsdp' shards, or the "
        "result of a torch.autograd.Function. Write x = x + y instead of x += y, and nn.ReLU() without inplace=True."
    ),
    "have the same dtype": (
        "Weights and data differ in dtype: give the data as float32 (batch.float()), or set the dtype of both with "
        "Trainer(precision=...). Where a layer or a buffer has another dtype (as under 'fsdp', which gathers in 16 "
        "bits), cast one of them: x.to(layer.weight.dtype), self.table.to(x.dtype)."
    ),
    "mixed dtype (CPU)": (
        "A layer got data of another dtype than its weights', which it cannot use on a CPU. Under 'fsdp' in a mixed "
        "precision all weights are gathered in 16 bits: give the layer x.to(layer.weight.dtype), or use '32-true'."
    ),
    "Expected more than 1 value per channel when training": (
        "A batch, or a process's part of it, has one sample, which is not enough for BatchNorm. Use "
        "DataLoader(drop_last=True), or another batch_size."
    ),
    "dispatch: attempting to run unimplemented operator": (
        "A quantized tensor of torchao lacks an operation. Freeze quantized weights and use them in nn.Linear alone; "
        "8-bit optimizers cannot update sharded bfloat16 weights, so use 'bf16-mixed', '32-true' or torch.optim."
    ),
    "Unable to find address for: ": (
        "GLOO_SOCKET_IFNAME names a network interface that this machine does not have: `ip link` lists them."
    ),
    "Expected all tensors to be on the same device": (
        "The trainer moves the module and its batches. Register other tensors with self.register_buffer, or create "
        "them with device=self.device."
    ),
}
"""Substring of torch's message -> advice."""


def explain_torch_error(error: BaseException) -> ConfigError | None:
    """Return a `ConfigError` with advice, whose cause is `error`; None for an error without advice."""
    if isinstance(error, TrainerError) or not isinstance(error, (RuntimeError, ValueError)):
        return None
    text = str(error)
    for part, advice in TORCH_ERRORS.items():
        if part in text:
            explained = ConfigError(f"{advice}\ntorch said: {text.splitlines()[0]}")
            explained.__cause__ = error
            return explained
    return None
