"""Keep the information for restarts under Ray Train in the key-value store of Ray's head."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.distributed.environment import detect_environment

_NAMESPACE = b"trainer"


class RayStore:
    """The methods of torch's `Store` that `RestartRecord` needs, for the workers of one run of Ray Train.

    The process group's own store ends with the workers; Ray's lives as long as the cluster. (It has no public API; the
    alternative, an actor, would be one more process.)

    Args:
        run: id of this run, unique in the cluster.
        worker: id of this process, different in each attempt.
    """

    def __init__(self, run: str, worker: str) -> None:
        self._run = run
        self._worker = worker

    def add(self, key: str, number: int) -> int:
        """Add to a counter of this worker, which starts at 0 after a restart; return the new value."""
        own = f"{self._worker}/{key}"
        value = (int(self.get(own)) if self.check([own]) else 0) + number
        self.set(own, str(value))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys exist."""
        from ray.experimental.internal_kv import _internal_kv_exists

        return all(_internal_kv_exists(self._full(key), namespace=_NAMESPACE) for key in keys)

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""
        from ray.experimental.internal_kv import _internal_kv_get

        value: bytes = _internal_kv_get(self._full(key), namespace=_NAMESPACE)
        return value

    def set(self, key: str, value: str) -> None:
        """Store a value, replacing a former one."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._full(key), value.encode(), overwrite=True, namespace=_NAMESPACE)

    def _full(self, key: str) -> bytes:
        return f"{self._run}/{key}".encode()


def ray_store() -> RayStore | None:
    """Return the store for a worker of Ray Train; None in any other process."""
    if detect_environment().source != "Ray Train":
        return None
    import ray
    from ray import train

    context = ray.get_runtime_context()
    try:
        name = train.get_context().get_experiment_name()
    except RuntimeError:
        return None  # another program set torchrun's variables in a Ray job
    return RayStore(f"{context.get_job_id()}/{name}", context.get_worker_id())
