"""Save in the background: training waits only for a copy in host memory, and a thread writes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.safetensors_io import flat_bytes
from trainer.checkpoint.storage import StoragePath
from trainer.checkpoint.writing import plan_save, write_plan
from trainer.distributed.devices import has_streams
from trainer.errors import CheckpointError

log = logging.getLogger("trainer")

being_written: set[str] = set()
"""The paths of checkpoints that threads of this process are writing: the storage does not know these names yet."""

_ALIGNMENT = 64
"""Bytes; a multiple is aligned for every dtype."""


class BackgroundWriter:
    """Write checkpoints in a separate thread, one at a time. Call all methods from the training thread."""

    def __init__(self) -> None:
        self._memory = PinnedStagingBuffer()
        self._thread: threading.Thread | None = None
        self._path: str | None = None
        self._error: CheckpointError | None = None
        self._has_warned = False

    def start(
        self,
        path: str | StoragePath,
        state: Mapping[str, Any],
        info: Mapping[str, Any] | None,
        on_committed: Callable[[], None],
        process_group: ProcessGroup = SINGLE_PROCESS,
        thread_group: ProcessGroup = SINGLE_PROCESS,
        overwrite: bool = False,
    ) -> None:
        """Copy `state` into host memory, and write it while the caller continues. Call `wait` before the next `start`.

        Args:
            path, state, info, process_group, overwrite: as for `write_checkpoint`.
            on_committed: called by the thread after the commit; its errors count as errors of the write.
            thread_group: the same processes, for the thread, which must not use the process group of training.

        Raises:
            CheckpointError: something in `state` cannot be stored.
        """
        assert self._thread is None, "wait() comes first"
        plan = plan_save(state, info, process_group)
        copy = replace(plan, files=self._memory.copy(plan.files))
        being_written.add(str(path))

        def write() -> None:
            try:
                self._memory.wait()
                write_plan(path, copy, overwrite, thread_group)
                on_committed()
                self._path = str(path)
            except CheckpointError as error:
                self._error = error
            except BaseException as error:
                self._error = WriteError(
                    f"the write of {path} failed, perhaps after it was complete: {type(error).__name__}: {error}"
                )
                self._error.__cause__ = error
            finally:
                being_written.discard(str(path))

        # Not a daemon: Python waits for the thread before it exits, so that the checkpoint is complete.
        self._thread = threading.Thread(target=write, name="checkpoint-writer")
        self._thread.start()

    def wait(self, due: bool = False) -> None:
        """Wait until nothing is being written. `due`: the next checkpoint is due; warn, once, that training waits."""
        if self._thread is None:
            return
        if due and self._thread.is_alive() and not self._has_warned:
            self._has_warned = True
            log.warning(
                "a checkpoint is due while the one before it is still being written: training waits. Save "
                "less often, or to faster storage. (Logged once.)"
            )
        self._thread.join()

    def result(self) -> tuple[str | None, CheckpointError | None]:
        """Return, once, how the last write ended: the path of a committed checkpoint, or the error."""
        if self._thread is None or self._thread.is_alive():
            return None, None
        self._thread = None
        path, error = self._path, self._error
        self._path = self._error = None
        return path, error

    def close(self) -> None:
        """Wait, and release the memory."""
        self.wait()
        self._memory.release()


class PinnedStagingBuffer:
    """A block of host memory that holds a copy of many tensors, and is reused for the next copy.

    Fresh memory costs several times the copy itself, because the system has to map every page of it. Tensors on a
    device with streams are copied into page-locked memory while the caller continues: call `wait` before reading the
    copy. Later work on the device's current stream does not change it.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._pending: list[torch.Event] = []

    def copy(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Return contiguous copies of the tensors in this memory, by the same two names; overwrite the last copy."""
        every = [tensor for group in tensors.values() for tensor in group.values()]
        devices = {tensor.device for tensor in every if has_streams(tensor.device.type)}
        self._reserve(sum(_padded(tensor) for tensor in every), pinned=bool(devices))
        position = 0
        copies: dict[str, dict[str, torch.Tensor]] = {}
        for key, group in tensors.items():
            copies[key] = {}
            for name, tensor in group.items():
                target = self._block[position : position + tensor.numel() * tensor.element_size()]
                position += _padded(tensor)
                copies[key][name] = _copy_into(target, tensor.detach())
        self._pending = [torch.accelerator.current_stream(device).record_event() for device in devices]
        return copies

    def wait(self) -> None:
        """Wait until the last copy is complete. Callable from any thread."""
        for event in self._pending:
            # Each thread has its own current device: without this, every process would use the first one.
            with torch.cuda.device(event.device) if event.device.type == "cuda" else nullcontext():
                event.synchronize()

    def release(self) -> None:
        """Give the memory back to the system."""
        self.wait()
        pinned = self._block.is_pinned()
        self._block = torch.empty(0, dtype=torch.uint8)
        if pinned and hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.12 and before keep it for themselves
            torch.accelerator.empty_host_cache()

    def _reserve(self, size: int, pinned: bool) -> None:
        if self._block.numel() < size or (pinned and not self._block.is_pinned()):
            self.release()  # before allocating, so that there are never two blocks
            self._block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


IDLE_WRITER = BackgroundWriter()
"""The writer of those that write in the training thread."""


def _copy_into(target: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # As bytes: torch cannot copy some of the small dtypes.
    target.copy_(flat_bytes(plain), non_blocking=has_streams(tensor.device.type))
    return target.view(tensor.dtype).reshape(tensor.shape)


def _padded(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes, rounded up to the alignment."""
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT
