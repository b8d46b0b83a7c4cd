"""Define the answers to the questions of `trainer config`, their settings, and the presets."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    "copies": ("strategy: ddp", "every process has the full model; gradients are averaged"),
    "shards": ("strategy: fsdp", "weights, gradients and optimizer are sharded over the processes, by torch itself"),
    "zero1": ("strategy: deepspeed_stage_1", "DeepSpeed: the optimizer is sharded"),
    "zero2": ("strategy: deepspeed_stage_2", "DeepSpeed: optimizer and gradients are sharded"),
    "zero3": ("strategy: deepspeed_stage_3", "DeepSpeed: optimizer, gradients and weights are sharded"),
    "tpu": ("strategy: xla", "one program for all TPU cores, by torch_xla"),
}
"""Layouts of the model over the processes: the line of a configuration, and its meaning."""


def strategy_name(layout: str) -> str:
    """Return the strategy's name in a configuration."""
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
    """The answers on where and how to train; None: no setting is written."""

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


GPUS = WizardAnswers("auto", 1, "auto", precision="bf16-mixed")
PRESETS: dict[str, tuple[str, WizardAnswers]] = {
    "cpu": ("one process on the CPU", WizardAnswers("cpu", 1, 1, "one", precision="32-true")),
    "single-gpu": ("one GPU", replace(GPUS, devices=1, layout="one")),
    "multi-gpu": ("all GPUs of the machine, each with the full model", replace(GPUS, layout="copies")),
    strategy_name("shards"): ("all GPUs, the model sharded over them", replace(GPUS, layout="shards")),
    "fsdp-offload": ("the same, kept in the memory of the CPU", replace(GPUS, layout="shards", offload="all")),
    "zero2": ("all GPUs, DeepSpeed shards optimizer and gradients", replace(GPUS, layout="zero2")),
    "zero3": ("all GPUs, DeepSpeed shards the weights, too", replace(GPUS, layout="zero3")),
    "zero3-offload": ("the same, kept in the memory of the CPU", replace(GPUS, layout="zero3", offload="all")),
    "tpu": ("the TPUs of the machine", replace(GPUS, machine="tpu", layout="tpu")),
    "bf16": ("only the precision, to lay over another file", WizardAnswers(precision="bf16-mixed")),
    "fp16": ("only the precision, to lay over another file", WizardAnswers(precision="16-mixed")),
}
OFFLOADED = {
    ("shards", "all"): ["cpu_offload"],
    ("zero1", "optimizer"): ["offload_optimizer"],
    ("zero2", "optimizer"): ["offload_optimizer"],
    ("zero3", "optimizer"): ["offload_optimizer"],
    ("zero3", "all"): ["offload_optimizer", "offload_parameters"],
}
"""Arguments of the strategy by layout and by the state that is kept in the CPU's memory."""


def offloads_of(layout: str | None) -> list[str]:
    """Return the keys of OFFLOADS that a layout allows."""
    return ["no", *(offload for one, offload in OFFLOADED if one == layout)]


def draft_of(answers: WizardAnswers) -> ConfigDraft:
    """Return the settings that the answers mean."""
    draft = ConfigDraft()
    machine, machines, window = answers.machine, answers.machines, answers.window
    if machine is not None:
        draft.set("accelerator", machine, MACHINES[machine])
    if answers.devices is not None:
        one = "processes on each machine" if machines > 1 else "processes"
        each = "one process for each device of the machine (one for a CPU)"
        draft.set("devices", answers.devices, each if answers.devices == "auto" else one)
    if machines > 1:
        draft.set("num_nodes", machines, "machines; each of them starts the command that stands above")
    if answers.layout is not None:
        draft.set("strategy", strategy_name(answers.layout), LAYOUTS[answers.layout][1])
        for name in OFFLOADED.get((answers.layout, answers.offload), []):
            draft.set(f"strategy.{name}", True if name == "cpu_offload" else "cpu")
    if answers.precision is not None:
        draft.set("precision", answers.precision, PRECISIONS[answers.precision])
    if window > 1:
        product = f"global batch = batch_size x {window} x processes"
        draft.set("accumulate_grad_batches", window, f"one step for every {window} batches of each process: {product}")
    if answers.checkpoints:
        callbacks = [{"class_path": "ModelCheckpoint", "init_args": answers.checkpoints}]
        draft.set("callbacks", callbacks, "the newest checkpoint is always kept: `--ckpt-path last` resumes from it")
    elif answers.checkpoints is not None:
        draft.set("enable_checkpointing", False, "no checkpoints: an interrupted run begins again")
    return draft


def launch_line(command: str, machines: int, devices: int | str | None, address: str = "HOST:29500") -> str:
    """Return a trainer command, preceded by the launcher where there are several machines."""
    if machines == 1:
        return command
    processes = f" --nproc-per-node {devices}" if isinstance(devices, int) else ""
    return f"trainer launch --nnodes {machines}{processes} --rdzv {address} {command}"
