"""Messages between neighbouring stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import ConfigError
from trainer.strategies.parallel.one_reader import as_real

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_MOST_DIMENSIONS = 8


class Neighbour:
    """Another stage, to send tensors to and receive them from, with shapes that may differ each time.

    Args:
        sending, receiving: a group for each direction; with one for both, NCCL would have a send wait for a receive.
        stage: of the neighbour.
    """

    def __init__(self, sending: dist.ProcessGroup, receiving: dist.ProcessGroup, stage: int) -> None:
        self._sending, self._receiving, self._stage = sending, receiving, stage
        self._pending: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor after a header with its shape and dtype.

        Raises:
            ConfigError: its dtype is not in the table of dtypes.
        """
        if tensor.dtype not in _DTYPES:
            raise ConfigError(
                f"what a block returns is {tensor.dtype}: between the stages of pipeline_parallel a tensor of "
                "floating-point or complex numbers travels."
            )
        header = [tensor.dim(), _DTYPES.index(tensor.dtype), *tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
        self.send_content(torch.tensor(header, device="cpu"))
        self.send_content(tensor)

    def send_content(self, tensor: torch.Tensor) -> None:
        """Send a tensor without waiting; its memory is kept until it has arrived."""
        self._pending = [(work, sent) for work, sent in self._pending if not work.is_completed()]
        content = tensor.detach().contiguous()
        self._pending.append((dist.isend(as_real(content), group=self._sending, group_dst=self._stage), content))

    def receive(self, device: torch.device) -> torch.Tensor:
        """Wait for a tensor with its header, and return it on `device`."""
        header = torch.zeros(_MOST_DIMENSIONS + 2, dtype=torch.int64, device="cpu")
        self.receive_content(header)
        dimensions, dtype, *shape = header.tolist()
        content = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=device)
        return self.receive_content(content)

    def receive_content(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait for the content of a tensor whose shape and dtype are known, and return it with that."""
        dist.recv(as_real(tensor), group=self._receiving, group_src=self._stage)
        return tensor

    def begin_to_receive(self, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that waits for a contiguous tensor of the shape and dtype of `like`, and returns it.

        On the CPU it comes while this process computes. On a GPU it is received when the function is called: until a
        message comes, NCCL's receive keeps a part of the GPU busy.
        """
        content = torch.empty_like(like, memory_format=torch.contiguous_format)
        if content.device.type != "cpu":
            return lambda: self.receive_content(content)
        work = dist.irecv(as_real(content), group=self._receiving, group_src=self._stage)
        assert work is not None  # of a process of the group

        def wait() -> torch.Tensor:
            work.wait()
            return content

        return wait

    @property
    def is_sending(self) -> bool:
        """Whether something that was sent has not been received."""
        return any(not work.is_completed() for work, _ in self._pending)

    def flush(self) -> None:
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
