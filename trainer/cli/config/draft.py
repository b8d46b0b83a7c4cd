"""Write settings of the trainer, each with its reason, as commented YAML."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from trainer.config.plug_names import precisions, strategies

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
WITHOUT_LAYOUT = {
    "strategy: deepspeed": "its stages are layouts",
    "strategy: deepspeed_stage_2_offload": "zero2, with the answer about the memory of the CPU",
    "strategy: deepspeed_stage_3_offload": "zero3, with the answer about the memory of the CPU",
    "strategy: xla_fsdp": "for TPUs, where the layout is not asked",
}
"""Strategies that are not layouts, and why. Any further strategy is a layout under its own name."""
_listed = {line for line, _ in LAYOUTS.values()} | WITHOUT_LAYOUT.keys()
LAYOUTS |= {name: (line, words) for name, words in strategies().items() if (line := f"strategy: {name}") not in _listed}


def strategy_name(layout: str) -> str:
    """Return the strategy's name in a configuration."""
    return LAYOUTS[layout][0].partition(": ")[2]


MACHINES = {
    "auto": "the best there is: GPUs, or else the CPU",
    "cuda": "GPUs of NVIDIA or AMD; refuse to run without",
    "mps": "the GPU of an Apple machine",
    "cpu": "the CPU",
    "tpu": "TPUs",
}
PRECISIONS = {
    "bf16-mixed": "bfloat16 where it suffices, weights in float32; for GPUs since 2020 (Ampere), TPUs, new CPUs",
    "16-mixed": "float16 with a scaled loss, weights in float32; for older GPUs",
    "32-true": "float32 everywhere",
    "bf16-true": "bfloat16 everywhere: half the memory, less exact",
}
PRECISIONS |= {name: words for name, words in precisions().items() if name not in PRECISIONS}
REASONS: dict[str, Any] = {
    "accelerator": MACHINES,
    "devices": {
        "auto": "one process for each device of the machine (one for a CPU)",
        "list": "the numbers of the GPUs",
        "int": "processes on each machine",
    },
    "num_nodes": "machines; each of them starts the command that stands above",
    "strategy": {strategy_name(layout): words for layout, (_, words) in LAYOUTS.items()},
    "precision": PRECISIONS,
    "accumulate_grad_batches": "batches of each process for one step: global batch = batch_size x these x processes",
    "gradient_clip_val": "clip the norm of all gradients",
    "activation_checkpointing": "compute activations again instead of keeping them",
    "compile": "torch.compile, in place",
    "profiler": "where the time of each part of a step goes",
    "callbacks": "the newest checkpoint is always kept: `--ckpt-path last` resumes from it",
    "enable_checkpointing": "no checkpoints: an interrupted run begins again",
}
"""The settings that may be written, in this order; the reason above each, or the reasons by value or its type."""

OFTEN_SET = {
    "max_epochs: 10": "when to stop; also max_steps, max_time",
    "gradient_clip_val: 1.0": "clip the norm of all gradients",
    "activation_checkpointing: auto": "compute activations again: less memory, a third more work",
    "seed: 42": "the same weights and the same order of the data in every run",
    "default_root_dir: runs": "run directories are made here",
}
"""Settings that are written as comments."""

WIDTH = 110


@dataclass
class ConfigDraft:
    """The settings of the trainer that are known so far."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Values by names such as `strategy` and, for an argument of it, `strategy.cpu_offload`."""

    def set(self, name: str, value: Any) -> str:
        """Add a setting. Returns a line of YAML."""
        self.settings[name] = value
        return f"{name}: {inline(value)}"

    def add(self, settings: str) -> None:
        """Add settings that are written as YAML: `strategy: fsdp, strategy.cpu_offload: true`."""
        import yaml

        for name, value in yaml.safe_load(f"{{{settings}}}").items():
            self.set(name, value)

    def text(self, head: list[str]) -> str:
        """Return the file's text. `head`: the first lines, written as comments."""
        from trainer.config.files import to_yaml

        lines = [f"# {line}".rstrip() for line in head] + ["", "trainer:"]
        for name, reason in REASONS.items():
            names = [key for key in self.settings if key.startswith(f"{name}.")]
            inside = {key.removeprefix(f"{name}."): self.settings[key] for key in names}
            value = self.settings.get(name, inside)
            if value == {}:
                continue
            if isinstance(reason, dict):
                reason = reason.get(str(value)) or reason.get(type(value).__name__, "")
            if name == "strategy" and inside:
                value = {"class_path": value, "init_args": inside}
            lines += [f"  # {line}" for line in textwrap.wrap(reason, WIDTH - 4)]
            lines += [f"  {line}" for line in to_yaml({name: value}).splitlines()]
        hints = {line: why for line, why in OFTEN_SET.items() if line.partition(":")[0] not in self.settings}
        lines += ["", "  # Often set, too; trainer fit --help lists everything:"]
        lines += [f"  # {line:<32}# {why}" for line, why in hints.items()]
        return "\n".join(lines) + "\n"


def launch_line(command: str, machines: int, devices: int | str | None, address: str = "HOST:29500") -> str:
    """Return a trainer command, preceded by the launcher where there are several machines."""
    if machines == 1:
        return command
    processes = f" --nproc-per-node {devices}" if isinstance(devices, int) else ""
    return f"trainer launch --nnodes {machines}{processes} --rdzv {address} {command}"


def inline(value: Any) -> str:
    """Return a value as YAML of one line."""
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9).removesuffix("...\n").strip()
