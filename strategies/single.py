"""One process, one device."""

from __future__ import annotations

from typing import ClassVar

from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer

from trainer.strategy import StepOptions, Strategy


class SingleDeviceStrategy(Strategy):
    """Everything on one device: every method's default."""

    name: ClassVar[str] = "single_device"

    _accumulators: tuple[Node, ...] = ()
    """The autograd nodes that accumulate the parameters' gradients.

    Without a reference they are freed with the graph of each loss, and the next forward creates them again.
    DistributedDataParallel keeps them, too."""

    def setup_optimizers(self, optimizers: list[Optimizer], config: StepOptions) -> list[Optimizer]:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._accumulators = tuple(get_gradient_edge(parameter).node for parameter in trained)
        return super().setup_optimizers(optimizers, config)

    def teardown(self) -> None:
        self._accumulators = ()
        super().teardown()
