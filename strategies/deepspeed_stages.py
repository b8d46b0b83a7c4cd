"""The stages of DeepSpeed's ZeRO as strategies of their own names."""

from __future__ import annotations

from typing import ClassVar

from trainer.strategies.deepspeed import DeepSpeedStrategy, Offload


class DeepSpeedStage1Strategy(DeepSpeedStrategy):
    """ZeRO 1: the optimizer's states are divided."""

    name: ClassVar[str] = "deepspeed_stage_1"
    default_stage: ClassVar[int | None] = 1


class DeepSpeedStage2Strategy(DeepSpeedStrategy):
    """ZeRO 2: the optimizer's states and the gradients are divided."""

    name: ClassVar[str] = "deepspeed_stage_2"
    default_stage: ClassVar[int | None] = 2


class DeepSpeedStage3Strategy(DeepSpeedStrategy):
    """ZeRO 3: the optimizer's states, the gradients and the weights are divided."""

    name: ClassVar[str] = "deepspeed_stage_3"
    default_stage: ClassVar[int | None] = 3


class DeepSpeedStage2OffloadStrategy(DeepSpeedStage2Strategy):
    """ZeRO 2 with the optimizer in the memory of the CPU."""

    name: ClassVar[str] = "deepspeed_stage_2_offload"
    default_offload: ClassVar[Offload] = "cpu"


class DeepSpeedStage3OffloadStrategy(DeepSpeedStage3Strategy):
    """ZeRO 3 with the optimizer and the weights in the memory of the CPU."""

    name: ClassVar[str] = "deepspeed_stage_3_offload"
    default_offload: ClassVar[Offload] = "cpu"
