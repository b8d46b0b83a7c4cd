"""An Accelerate configuration (`default_config.yaml`) as ours; key names are those of accelerate 1.15."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from trainer.cli.config_accelerate_sections import SECTIONS
from trainer.cli.config_deepspeed import set_precision
from trainer.cli.config_translation import Translation, flag, number
from trainer.errors import did_you_mean

LINES = {
    "NO": ("strategy: single_device", "one process on one device"),
    "MULTI_GPU": ("strategy: ddp", "every process has the whole model; gradients are averaged"),
    "MULTI_CPU": ("strategy: ddp", "every process has the whole model; gradients are averaged"),
    "FSDP": ("strategy: fsdp", "weights, gradients and optimizer are divided among the processes"),
    "XLA": ("strategy: xla", "one program for all TPU cores, by torch_xla"),
    "TPU": ("strategy: xla", "one program for all TPU cores, by torch_xla"),
}
MEGATRON = ("strategy: fsdp", "in place of Megatron-LM, which is not to be had here: the model is divided by FSDP")
ONLY_WITH = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
"""Sections that are read with one distributed_type only."""
NOT_NEEDED = {
    "compute_environment": "it is found out at the start: trainer env shows it",
    "main_training_function": "the configuration names a class (module), not a function",
    "same_network": "machines meet at --rdzv, wherever they are",
    "rdzv_backend": "it is always c10d",
    "debug": "a collective that not all processes make is always told",
    "tpu_use_sudo": "for Accelerate's own start of a pod",
}
TPU_POD = "gcloud compute tpus tpu-vm ssh {name} --zone {zone} --worker=all --command 'trainer fit ...'"
SAGEMAKER = "SageMaker is not driven from here: let its PyTorch estimator start `torchrun -m trainer fit --config ...`"


def from_accelerate(translation: Translation, given: dict[str, Any]) -> None:
    """Every key of an Accelerate configuration."""
    _processes(translation, given)
    for key, value in given.items():
        if key in SECTIONS and isinstance(value, dict):
            _section(translation, key, value, _kind(given))
        elif key in SECTIONS and value in (None, ""):
            translation.not_needed(key, value, "it is empty")
        elif key in HANDLERS:
            HANDLERS[key](translation, value, given)
        elif key in NOT_NEEDED:
            sagemaker = str(value).endswith("SAGEMAKER")
            (translation.impossible if sagemaker else translation.not_needed)(
                key, value, SAGEMAKER if sagemaker else NOT_NEEDED[key]
            )
        elif str(given.get("compute_environment", "")).endswith("SAGEMAKER"):
            translation.impossible(key, value, SAGEMAKER)
        else:
            close = did_you_mean(str(key), [*HANDLERS, *SECTIONS, *NOT_NEEDED])
            translation.impossible(key, value, f"no key of accelerate 1.15.{close} Nothing was done with it")


def _section(translation: Translation, key: str, value: dict[str, Any], kind: str) -> None:
    if ONLY_WITH.get(key, kind) == kind:
        SECTIONS[key](translation, value)
        return
    for inner, one in value.items():
        translation.not_needed(f"{key}.{inner}", one, f"distributed_type is {kind}, which does not read it")


def _processes(translation: Translation, given: dict[str, Any]) -> None:
    """Counts first: other keys are explained by them."""
    machines = number(given.get("num_machines", 1))
    total = number(given.get("num_processes"))
    translation.machines = int(machines or 1)
    if total is not None and total > 0 and _kind(given) not in ("XLA", "TPU"):
        translation.devices = max(1, int(total) // translation.machines)
    elif _kind(given) == "NO":
        translation.devices = 1
    port = number(given.get("main_process_port"))
    translation.port = int(port) if port else 29500
    host = given.get("main_process_ip")
    translation.host = str(host) if host else None
    if translation.devices is not None and not _ids(given.get("gpu_ids")):
        words = "processes on each machine" if translation.machines > 1 else "processes"
        translation.draft.set("devices", translation.devices, words)
    if flag(given.get("use_cpu", False)) or _kind(given) == "MULTI_CPU":
        translation.draft.set("accelerator", "cpu", "the CPU, even where there is a GPU")


def _kind(given: dict[str, Any]) -> str:
    value = given.get("distributed_type", "NO")
    return "NO" if value in (False, None) else str(value).rpartition(".")[2].upper()


def _distributed_type(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    kind, draft, key = _kind(given), translation.draft, "distributed_type"
    if kind == "DEEPSPEED":
        translation.taken(key, value, "strategy: deepspeed_stage_..., see deepspeed_config")
        if not isinstance(given.get("deepspeed_config"), dict):
            SECTIONS["deepspeed_config"](translation, {})
    elif kind == "MEGATRON_LM":
        translation.impossible(key, value, f"no tensor or pipeline parallelism: {draft.line(*MEGATRON)} is written")
    elif kind == "NO" and (translation.devices or 1) * translation.machines > 1:
        translation.taken(key, value, draft.line(*LINES["MULTI_GPU"]) + ", as there are several processes")
    elif kind in ("XLA", "TPU"):
        draft.set("accelerator", "tpu", "TPUs")
        translation.taken(key, value, draft.line(*LINES[kind]) + ", accelerator: tpu")
    elif kind in LINES:
        if draft.value("strategy") is None:  # parallelism_config may have said it
            translation.taken(key, value, draft.line(*LINES[kind]))
        else:
            translation.not_needed(key, value, "another key says more")
    else:
        words = f"no strategy for these devices is tested here; {draft.line(*LINES['MULTI_GPU'])} is written"
        translation.impossible(key, value, words)


def _mixed_precision(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    name = "no" if value in (False, None) else str(value).lower()
    if name in ("fp16", "bf16"):
        sums = "; gradients are summed in float32 (Accelerate: in this precision, strategy.reduce_dtype)"
        set_precision(translation, name, "mixed_precision", value, sums if _kind(given) == "FSDP" else "")
    elif name == "fp8":
        line = translation.draft.set("precision", "bf16-mixed", "in place of fp8, which is not to be had here")
        translation.impossible("mixed_precision", value, f"there is no fp8; {line} is written")
    elif name == "no":
        words = "float32 everywhere"
        translation.taken("mixed_precision", value, translation.draft.set("precision", "32-true", words))
    else:
        translation.impossible("mixed_precision", value, "allowed are no, fp16, bf16, fp8; precision is left as it is")


def _old_fp16(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    if flag(value) and "mixed_precision" not in given:
        set_precision(translation, "fp16", "fp16", value)
    else:
        translation.not_needed("fp16", value, "mixed_precision says it")


def _num_processes(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    if _kind(given) in ("XLA", "TPU"):
        translation.not_needed("num_processes", value, "one process drives all TPU cores of a machine")
    elif translation.devices is None:
        translation.impossible("num_processes", value, "no number from 1; devices is left at auto: one for each GPU")
    elif number(value) != translation.devices * translation.machines:
        words = f"cannot be divided by {translation.machines} machines; devices: {translation.devices} is written"
        translation.impossible("num_processes", value, words)
    else:
        total = f" on each machine ({value} is the total of {translation.machines})" if translation.machines > 1 else ""
        translation.taken("num_processes", value, f"devices: {translation.devices}{total}")


def _num_machines(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    if translation.machines == 1:
        translation.not_needed("num_machines", value, "one machine is the default")
        return
    line = translation.draft.set("num_nodes", translation.machines, "machines; each of them starts the command above")
    translation.taken("num_machines", value, f"{line}, and --nnodes {translation.machines}")


def _machine_rank(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    if translation.machines == 1:
        translation.not_needed("machine_rank", value, "there is one machine")
        return
    words = f"--node-rank {value}, on this machine. It can be left out: the machines are numbered by themselves"
    translation.launched("machine_rank", value, words)


def _meeting(key: str) -> Callable[[Translation, Any, dict[str, Any]], None]:
    def handle(translation: Translation, value: Any, given: dict[str, Any]) -> None:
        if value is None:
            translation.not_needed(key, value, "nothing is given")
        elif translation.machines == 1:
            translation.not_needed(key, value, "on one machine a free port is found")
        else:
            translation.launched(key, value, f"--rdzv {translation.host or 'HOST'}:{translation.port}")

    return handle


def _ids(value: Any) -> list[int]:
    words = str(value).split(",") if value not in (None, "") else []
    return [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else []


def _gpu_ids(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    ids = _ids(value)
    if not ids:
        translation.not_needed("gpu_ids", value, "the first GPUs of the machine are used, as many as devices says")
    elif translation.devices is not None and translation.devices != len(ids):
        line = translation.draft.set("devices", ids, "the numbers of the GPUs")
        translation.impossible("gpu_ids", value, f"{len(ids)} GPUs, {translation.devices} processes; {line} is written")
    elif flag(given.get("use_cpu", False)):
        translation.not_needed("gpu_ids", value, "it runs on the CPU")
        translation.draft.set("devices", translation.devices or len(ids), "processes")
    else:
        translation.taken("gpu_ids", value, translation.draft.set("devices", ids, "the numbers of the GPUs"))


def _use_cpu(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    if flag(value):
        translation.taken("use_cpu", value, "accelerator: cpu")
    else:
        translation.not_needed("use_cpu", value, "GPUs are taken where there are any (accelerator: auto)")


def _downcast(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    if flag(value):
        words = "torch_xla no longer casts by itself; --trainer.precision bf16-true stores and computes in bfloat16"
        translation.impossible("downcast_bf16", value, words)
    else:
        translation.not_needed("downcast_bf16", value, "it is off")


def _affinity(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    if flag(value):
        translation.impossible("enable_cpu_affinity", value, "put numactl before the command, or srun --cpu-bind")
    else:
        translation.not_needed("enable_cpu_affinity", value, "it is off")


def _tpu(key: str) -> Callable[[Translation, Any, dict[str, Any]], None]:
    def handle(translation: Translation, value: Any, given: dict[str, Any]) -> None:
        if value in (None, [], "", False) or (isinstance(value, str) and not flag(value) and key == "tpu_use_cluster"):
            translation.not_needed(key, value, "nothing is given")
        elif key == "tpu_env":
            words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            translation.launched(key, value, f"set these variables before the command: {words}")
        elif key in ("commands", "command_file"):
            translation.launched(key, value, "run it on the TPU machines before the training, as you do now")
        else:
            name = shlex.quote(str(given.get("tpu_name") or given.get("tpu_vm") or "NAME"))
            zone = given.get("tpu_zone") or "ZONE"
            translation.launched(key, value, TPU_POD.format(name=name, zone=zone))

    return handle


def _old_dynamo(translation: Translation, value: Any, given: dict[str, Any]) -> None:
    SECTIONS["dynamo_config"](translation, {"dynamo_backend": value})


TPU_KEYS = ("tpu_name", "tpu_zone", "tpu_vm", "tpu_use_cluster", "tpu_env", "commands", "command_file")
HANDLERS: dict[str, Callable[[Translation, Any, dict[str, Any]], None]] = {
    "distributed_type": _distributed_type,
    "mixed_precision": _mixed_precision,
    "fp16": _old_fp16,
    "num_processes": _num_processes,
    "num_machines": _num_machines,
    "machine_rank": _machine_rank,
    "main_process_ip": _meeting("main_process_ip"),
    "main_process_port": _meeting("main_process_port"),
    "gpu_ids": _gpu_ids,
    "use_cpu": _use_cpu,
    "downcast_bf16": _downcast,
    "enable_cpu_affinity": _affinity,
    "dynamo_backend": _old_dynamo,
    **{key: _tpu(key) for key in TPU_KEYS},
}
"""What is done with each key that holds a plain value."""
