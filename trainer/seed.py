"""Random numbers: seed the global generators, derive seeds, save and restore the generators' states.

Two functions derive a seed from parts. Both stay, because the random numbers of existing runs depend on them:
`derive_seed` for the generators of each rank, `mix_seed` for everything in data (order, and the random numbers of each
batch or sample), whose permutations compute the same hash on arrays.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from trainer.distributed.environment import detect_environment
from trainer.distributed.tpu import torch_tpu_is_ready
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.distributed.process_group import SingleProcess

_MASK = 2**64 - 1


class HasState(Protocol):
    """A random generator."""

    def get_state(self) -> Any:
        """Return the state."""

    def set_state(self, state: Any) -> Any:
        """Restore what `get_state` returned."""


GLOBAL_SEED = "TRAINER_GLOBAL_SEED"
"""The environment variable with the seed of the last `seed_everything`, for later runs without a seed."""


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed the global generators, as `seed_generators` does, and later runs of a Trainer without a seed; return it.

    Args:
        seed: None: the last call's seed, or else the environment variable PL_GLOBAL_SEED, or else 0.
        workers: no effect: the workers of a run are always seeded, by its seed.
        verbose: no effect: the run directory has the seed.

    Raises:
        ConfigError: `seed` is not an integer from 0 to 2**63 - 1.
    """
    if seed is None:
        text = os.environ.get(GLOBAL_SEED, os.environ.get("PL_GLOBAL_SEED", "0"))
        seed = int(text) if text.isdecimal() else 0
    seed = int(seed) if isinstance(seed, np.integer) else seed
    seed_generators(seed)
    os.environ[GLOBAL_SEED] = str(seed)
    return seed


def global_seed() -> int | None:
    """Return the seed of the last `seed_everything`; None without one."""
    text = os.environ.get(GLOBAL_SEED, "")
    return int(text) if text.isdecimal() else None


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (all devices), numpy (with the lower 32 bits) and `random`.

    Raises:
        ConfigError: `seed` is not an integer from 0 to 2**63 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed!r}: allowed is an integer from 0 to 2**63 - 1.")
    if torch_tpu_is_ready() and detect_environment().source == "single process":
        # This process may still start others, and a chip belongs to the first process that touches it.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_cpu_generators(seed: int) -> None:
    """Seed the global generators of torch (CPU), numpy and `random` with a number from 0 to 2**64 - 1."""
    # torch.manual_seed visits every backend, which costs more than all three of these.
    torch.default_generator.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_accelerator() -> None:
    """Seed the device's generator like the CPU's generator, whose state is kept."""
    state = torch.get_rng_state()
    torch.manual_seed(torch.initial_seed())
    torch.set_rng_state(state)


def derive_seed(*parts: int | str) -> int:
    """Return a seed from 0 to 2**63 - 1 that depends on all parts, the same on every machine and Python version."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{'s' if isinstance(part, str) else 'i'}{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def mix_seed(*parts: int) -> int:
    """Return a 64-bit seed from coordinates such as (seed, epoch, position, rank), the same on every machine.

    Each part goes through the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", OOPSLA 2014), so that neighbouring coordinates give unrelated seeds.
    """
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the global generators' states as data: tensors on the cpu, numbers, strings, None.

    Args:
        device: include the generator of this device, if it has one that torch shows.
    """
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": _numpy_as_data(np.random.get_state(legacy=False)),
        "python": _python_as_data(random.getstate()),
    }
    if device is not None and (module := _module_with_generator(device)) is not None:
        state[device.type] = module.get_rng_state(*_argument(device))
    return state


def _numpy_as_data(state: Mapping[str, Any]) -> dict[str, Any]:
    inner = dict(state["state"])
    if state["bit_generator"] == "MT19937":
        inner["key"] = torch.from_numpy(inner["key"].astype(np.int64))
    return {**state, "state": inner}


def _python_as_data(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def _numpy_of_data(data: Mapping[str, Any]) -> dict[str, Any]:
    inner = dict(data["state"])
    if isinstance(inner.get("key"), torch.Tensor):
        inner["key"] = inner["key"].cpu().numpy().astype(np.uint32)
    return {**data, "state": inner}


def _python_of_data(data: Mapping[str, Any]) -> tuple[Any, ...]:
    return data["version"], tuple(data["words"].tolist()), data["gauss"]


def generator_state(generator: Any) -> dict[str, Any]:
    """Return the state of one generator of torch, numpy or Python as data, under the name that `rng_state` gives it.

    {} for a numpy generator with bits from another package.
    """
    if isinstance(generator, torch.Generator):
        kind = generator.device.type
        return {"torch" if kind == "cpu" else kind: generator.get_state()}
    if isinstance(generator, random.Random):
        return {"python": _python_as_data(random.Random.getstate(generator))}
    is_legacy = isinstance(generator, np.random.RandomState)
    state = generator.get_state(legacy=False) if is_legacy else generator.bit_generator.state
    return {"numpy": _numpy_as_data(state)} if hasattr(np.random, state["bit_generator"]) else {}


def set_generator_state(generator: Any, state: Mapping[str, Any]) -> bool:
    """Restore what `generator_state` returned; return False, and do nothing, for a generator of another kind."""
    own = generator_state(generator)
    kinds = [(*one, *one.get("numpy", ()), one.get("numpy", {}).get("bit_generator")) for one in (own, state)]
    if kinds[0] != kinds[1]:
        return False
    if isinstance(generator, torch.Generator):
        generator.set_state(next(iter(state.values())).cpu())
    elif isinstance(generator, random.Random):
        random.Random.setstate(generator, _python_of_data(state["python"]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_numpy_of_data(state["numpy"]))
    else:
        generator.bit_generator.state = _numpy_of_data(state["numpy"])
    return True


def generator_like(state: Mapping[str, Any]) -> Any:
    """Return a new generator of the kind of a state that `generator_state` returned."""
    if "python" in state:
        return random.Random()
    if "numpy" in state:
        bits = getattr(np.random, state["numpy"]["bit_generator"])(0)
        return np.random.RandomState(bits) if "gauss" in state["numpy"] else np.random.Generator(bits)
    return torch.Generator("cpu" if "torch" in state else next(iter(state)))


def _module_with_generator(device: torch.device) -> Any:
    """Return torch's module for the device's type, such as `torch.cuda`, if it shows a generator; None if not."""
    if device.type == "cpu":
        return None
    if device.type == "xla":
        from torch_xla.core import xla_model

        return xla_model
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None


def _argument(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)


def set_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore what `rng_state` returned; a device's generator is restored only on a device of the same type."""
    torch.set_rng_state(state["torch"].cpu())
    if device is not None and device.type in state and (module := _module_with_generator(device)) is not None:
        of_device = state[device.type]  # XLA's is a number
        module.set_rng_state(of_device if device.type == "xla" else of_device.cpu(), *_argument(device))
    np.random.set_state(_numpy_of_data(state["numpy"]))
    random.setstate(_python_of_data(state["python"]))


def seed_readers(seed: int, given: bool, processes: SingleProcess, device: torch.device) -> None:
    """Have each reader of data draw other numbers from now on, if a seed was `given`. Collective.

    Reader 0 continues with the generators that the given seed has seeded, as a single process does.
    """
    if processes.reader > 0 and (given or global_seed() is not None):
        seed_generators(derive_seed(seed, processes.reader))
    share_random_numbers(processes, device)


def share_random_numbers(processes: SingleProcess, device: torch.device) -> None:
    """Have all processes of one model draw the numbers that the first of them draws from now on. Collective.

    Without a seed their generators differ from the start, and with one where rank 0 alone has built the layers.
    """
    if processes.readers < processes.world_size:
        first = processes.reader_of.index(processes.reader)
        states = processes.all_gather_object(rng_state(device) if processes.rank == first else None)
        state = states[first]
        assert state is not None
        set_rng_state(state, device)


def isolate_rng(include_cuda: bool = True) -> AbstractContextManager[None]:
    """Return `isolated_rng`, with the generator of the current GPU if there is one: Lightning's name."""
    include_cuda = include_cuda and torch.cuda.is_available()
    return isolated_rng(torch.device("cuda", torch.cuda.current_device()) if include_cuda else None)


@contextmanager
def isolated_rng(device: torch.device | None = None, generators: Sequence[HasState] = ()) -> Iterator[None]:
    """Restore the states of the global generators on exit.

    Args:
        device: include the generator of this device, if it has one that torch shows.
        generators: further generators to restore.
    """
    state = rng_state(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        set_rng_state(state, device)
        for generator, before in zip(generators, states, strict=True):
            generator.set_state(before)


class PrivateRng:
    """A faster `isolated_rng` (a tenth of the time) for each batch; the block first calls `seed_cpu_generators`.

    numpy's legacy `np.random.normal` draws numbers in pairs; the second number of a pair is dropped on exit. See
    `drop_cached_normal`.
    """

    def __init__(self) -> None:
        self._inside = np.random.MT19937(0)
        # numpy.random is imported here, and not by `import trainer`.
        self._get, self._set = np.random.mtrand.get_bit_generator, np.random.mtrand.set_bit_generator
        self._outside: tuple[torch.Tensor, Any, Any]

    def __enter__(self) -> None:
        # Exchanged, because np.random.get_state and set_state take 30 microseconds each.
        self._outside = torch.default_generator.get_state(), random.getstate(), self._get()
        self._set(self._inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.default_generator.set_state(self._outside[0])
        random.setstate(self._outside[1])
        self._set(self._outside[2])


def drop_cached_normal() -> None:
    """Drop the cached second number of numpy's legacy normal distribution, as leaving a `PrivateRng` does.

    Called where no `PrivateRng` is entered, so that the numbers that follow are the same in both cases.
    """
    np.random.mtrand.set_bit_generator(np.random.mtrand.get_bit_generator())


def set_deterministic(deterministic: bool | str, benchmark: bool | None = None) -> Callable[[], None]:
    """Set torch's deterministic algorithms and cuDNN's benchmark mode.

    Args:
        deterministic: True (an operation without a deterministic algorithm raises), `"warn"` (such an operation
            warns), or False (keep torch's setting).
        benchmark: value of `torch.backends.cudnn.benchmark`; None: False with `deterministic`, else unchanged.

    Returns:
        A function that restores torch's settings.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    if deterministic:
        # cuBLAS reads this variable on first use: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=bool(deterministic == "warn"))
        torch.backends.cudnn.benchmark = False
    elif benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark

    def undo() -> None:
        if deterministic:  # the call imports torch._inductor, which takes a second
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]

    return undo
