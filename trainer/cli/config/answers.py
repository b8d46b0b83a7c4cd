"""Where and how to train, as it is asked for in plain words, and the presets: answers that are given in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.cli.config.writer import ConfigDraft

MACHINES = {
    "auto": "the best there is: GPUs, or else the CPU",
    "cuda": "GPUs of NVIDIA or AMD; refuse to run without",
    "mps": "the GPU of an Apple machine",
    "cpu": "the CPU",
    "tpu": "TPUs",
}
LAYOUTS = {
    "one": ("strategy: single_device", "one process on one device"),
    "copies": ("strategy: ddp", "every process has the whole model; gradients are averaged"),
    "shards": ("strategy: fsdp", "weights, gradients and optimizer are divided among the processes, by torch itself"),
    "zero1": ("strategy: deepspeed_stage_1", "DeepSpeed: the optimizer is divided"),
    "zero2": ("strategy: deepspeed_stage_2", "DeepSpeed: optimizer and gradients are divided"),
    "zero3": ("strategy: deepspeed_stage_3", "DeepSpeed: optimizer, gradients and weights are divided"),
    "tpu": ("strategy: xla", "one program for all TPU cores, by torch_xla"),
}
"""What each process holds: the line of a configuration, and what it means."""


def named(layout: str) -> str:
    """What a configuration calls it."""
    return LAYOUTS[layout][0].partition(": ")[2]


OFFLOADS = {
    "no": "nothing: it is the fastest",
    "optimizer": "the optimizer's state and the master weights",
    "all": "the weights, too: the slowest, and needs the least memory of the GPU",
}
PRECISIONS = {
    "bf16-mixed": "bfloat16 where it suffices, weights in float32; for GPUs since 2020 (Ampere), TPUs, new CPUs",
    "16-mixed": "float16 with a scaled loss, weights in float32; for older GPUs",
    "32-true": "float32 everywhere",
    "bf16-true": "bfloat16 everywhere: half the memory, less exact",
}


@dataclass(frozen=True)
class WizardAnswers:
    """What is to be written; None: nothing is said about it."""

    machine: str | None = None
    machines: int = 1
    devices: int | str | None = None
    """Processes on each machine; "auto": one for each device."""
    layout: str | None = None
    offload: str = "no"
    precision: str | None = None
    window: int = 1
    checkpoints: dict[str, Any] | None = None
    """Arguments of ModelCheckpoint; empty: no checkpoints."""


PRESETS: dict[str, tuple[str, WizardAnswers]] = {
    "cpu": ("one process on the CPU", WizardAnswers("cpu", 1, 1, "one", precision="32-true")),
    "single-gpu": ("one GPU", WizardAnswers("auto", 1, 1, "one", precision="bf16-mixed")),
    "multi-gpu": (
        "all GPUs of the machine, each with the whole model",
        WizardAnswers("auto", 1, "auto", "copies", precision="bf16-mixed"),
    ),
    named("shards"): (
        "all GPUs, the model divided among them",
        WizardAnswers("auto", 1, "auto", "shards", precision="bf16-mixed"),
    ),
    "fsdp-offload": (
        "the same, kept in the memory of the CPU",
        WizardAnswers("auto", 1, "auto", "shards", "all", "bf16-mixed"),
    ),
    "zero2": (
        "all GPUs, DeepSpeed divides optimizer and gradients",
        WizardAnswers("auto", 1, "auto", "zero2", precision="bf16-mixed"),
    ),
    "zero3": (
        "all GPUs, DeepSpeed divides the weights, too",
        WizardAnswers("auto", 1, "auto", "zero3", precision="bf16-mixed"),
    ),
    "zero3-offload": (
        "the same, kept in the memory of the CPU",
        WizardAnswers("auto", 1, "auto", "zero3", "all", "bf16-mixed"),
    ),
    "tpu": ("the TPUs of the machine", WizardAnswers("tpu", 1, "auto", "tpu", precision="bf16-mixed")),
    "bf16": ("only the precision, to lay over another file", WizardAnswers(precision="bf16-mixed")),
    "fp16": ("only the precision, to lay over another file", WizardAnswers(precision="16-mixed")),
}


def offloads_of(layout: str | None) -> list[str]:
    """What can be kept in the memory of the CPU with this layout."""
    if layout == "shards":
        return ["no", "all"]
    return {"zero1": ["no", "optimizer"], "zero2": ["no", "optimizer"], "zero3": ["no", "optimizer", "all"]}.get(
        layout or "", ["no"]
    )


def draft_of(answers: WizardAnswers) -> ConfigDraft:
    """The settings that the answers mean."""
    draft = ConfigDraft()
    if answers.machine is not None:
        draft.set("accelerator", answers.machine, MACHINES[answers.machine])
    if answers.devices is not None:
        everything = "one process for each device of the machine (one for a CPU)"
        one = "processes on each machine" if answers.machines > 1 else "processes"
        draft.set("devices", answers.devices, everything if answers.devices == "auto" else one)
    if answers.machines > 1:
        draft.set("num_nodes", answers.machines, "machines; each of them starts the command that stands above")
    if answers.layout is not None:
        line, words = LAYOUTS[answers.layout]
        draft.line(line, words)
        _offload(draft, answers)
    if answers.precision is not None:
        draft.set("precision", answers.precision, PRECISIONS[answers.precision])
    if answers.window > 1:
        draft.set(
            "accumulate_grad_batches",
            answers.window,
            f"one step for every {answers.window} batches of each process: global batch = batch_size x "
            f"{answers.window} x processes",
        )
    _checkpoints(draft, answers.checkpoints)
    return draft


def _offload(draft: ConfigDraft, answers: WizardAnswers) -> None:
    if answers.offload == "no":
        return
    if answers.layout == "shards":
        draft.argument("cpu_offload", True)
        return
    draft.argument("offload_optimizer", "cpu")
    if answers.offload == "all":
        draft.argument("offload_parameters", "cpu")


def _checkpoints(draft: ConfigDraft, arguments: dict[str, Any] | None) -> None:
    if arguments is None:
        return
    if not arguments:
        draft.set("enable_checkpointing", False, "no checkpoints: an interrupted run begins again")
        return
    draft.set(
        "callbacks",
        [{"class_path": "ModelCheckpoint", "init_args": arguments}],
        "checkpoints; the newest is always kept, and `--ckpt-path last` goes on from it",
    )


def launch_line(
    command: str, machines: int, devices: int | str | None, meeting: str = "HOST:29500", rank: int | None = None
) -> str:
    """A trainer command with what starts it on several machines."""
    if machines == 1:
        return command
    processes = f" --nproc-per-node {devices}" if isinstance(devices, int) else ""
    number = "" if rank is None else f" --node-rank {rank}"
    return f"trainer launch --nnodes {machines}{processes} --rdzv {meeting}{number} {command}"
