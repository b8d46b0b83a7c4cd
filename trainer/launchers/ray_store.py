"""Restarts under Ray Train: what one attempt leaves for the next, in the key-value store of Ray's head."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.distributed.environment import detect_environment

_NAMESPACE = b"trainer"


class RayStore:
    """The verbs of torch's `Store` that `RestartRecord` needs, for the workers of one run of Ray Train.

    The process group's own store ends with the workers. Ray's lives as long as the cluster. (It has no public name; the
    alternative, an actor, would be one more process.)

    Args:
        run: tells this run apart from all others of the cluster.
        worker: tells this process apart from those of other attempts.
    """

    def __init__(self, run: str, worker: str) -> None:
        self._run = run
        self._worker = worker

    def add(self, key: str, number: int) -> int:
        """Add to a count that is this worker's own, so that one started again begins at 0; gives the new value."""
        own = f"{self._worker}/{key}"
        value = (int(self.get(own)) if self.check([own]) else 0) + number
        self.set(own, str(value))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        from ray.experimental.internal_kv import _internal_kv_exists

        return all(_internal_kv_exists(self._full(key), namespace=_NAMESPACE) for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        from ray.experimental.internal_kv import _internal_kv_get

        value: bytes = _internal_kv_get(self._full(key), namespace=_NAMESPACE)
        return value

    def set(self, key: str, value: str) -> None:
        """Store a value; the former one is lost."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._full(key), value.encode(), overwrite=True, namespace=_NAMESPACE)

    def _full(self, key: str) -> bytes:
        return f"{self._run}/{key}".encode()


def ray_store() -> RayStore | None:
    """The store of the run of Ray Train whose worker this process is; None in any other process."""
    if detect_environment().source != "Ray Train":
        return None
    import ray
    from ray import train

    context = ray.get_runtime_context()
    try:
        name = train.get_context().get_experiment_name()
    except RuntimeError:
        return None  # torchrun's variables were set by somebody else in a Ray job
    return RayStore(f"{context.get_job_id()}/{name}", context.get_worker_id())
