"""An Accelerate configuration (`default_config.yaml`) as ours; key names are those of accelerate 1.15."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.cli.config.from_deepspeed import finish, from_deepspeed, set_clipping, set_precision, set_window
from trainer.cli.config.translate import MigrationReport, flag, number
from trainer.config.files import read_tree
from trainer.config.tree import Diagnostics
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


def from_accelerate(translation: MigrationReport, given: dict[str, Any]) -> None:
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


def _section(translation: MigrationReport, key: str, value: dict[str, Any], kind: str) -> None:
    if ONLY_WITH.get(key, kind) == kind:
        SECTIONS[key](translation, value)
        return
    for inner, one in value.items():
        translation.not_needed(f"{key}.{inner}", one, f"distributed_type is {kind}, which does not read it")


def _processes(translation: MigrationReport, given: dict[str, Any]) -> None:
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


def _distributed_type(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
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


def _mixed_precision(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
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


def _old_fp16(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
    if flag(value) and "mixed_precision" not in given:
        set_precision(translation, "fp16", "fp16", value)
    else:
        translation.not_needed("fp16", value, "mixed_precision says it")


def _num_processes(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
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


def _num_machines(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
    if translation.machines == 1:
        translation.not_needed("num_machines", value, "one machine is the default")
        return
    line = translation.draft.set("num_nodes", translation.machines, "machines; each of them starts the command above")
    translation.taken("num_machines", value, f"{line}, and --nnodes {translation.machines}")


def _machine_rank(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
    if translation.machines == 1:
        translation.not_needed("machine_rank", value, "there is one machine")
        return
    words = f"--node-rank {value}, on this machine. It can be left out: the machines are numbered by themselves"
    translation.launched("machine_rank", value, words)


def _meeting(key: str) -> Callable[[MigrationReport, Any, dict[str, Any]], None]:
    def handle(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
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


def _gpu_ids(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
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


def _use_cpu(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
    if flag(value):
        translation.taken("use_cpu", value, "accelerator: cpu")
    else:
        translation.not_needed("use_cpu", value, "GPUs are taken where there are any (accelerator: auto)")


def _downcast(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
    if flag(value):
        words = "torch_xla no longer casts by itself; --trainer.precision bf16-true stores and computes in bfloat16"
        translation.impossible("downcast_bf16", value, words)
    else:
        translation.not_needed("downcast_bf16", value, "it is off")


def _affinity(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
    if flag(value):
        translation.impossible("enable_cpu_affinity", value, "put numactl before the command, or srun --cpu-bind")
    else:
        translation.not_needed("enable_cpu_affinity", value, "it is off")


def _tpu(key: str) -> Callable[[MigrationReport, Any, dict[str, Any]], None]:
    def handle(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
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


def _old_dynamo(translation: MigrationReport, value: Any, given: dict[str, Any]) -> None:
    SECTIONS["dynamo_config"](translation, {"dynamo_backend": value})


TPU_KEYS = ("tpu_name", "tpu_zone", "tpu_vm", "tpu_use_cluster", "tpu_env", "commands", "command_file")
HANDLERS: dict[str, Callable[[MigrationReport, Any, dict[str, Any]], None]] = {
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


UNKNOWN = "no key of accelerate 1.15.{close} Nothing was done with it"
RECOMPUTE = "compute activations again instead of keeping them"

# -- FSDP --------------------------------------------------------------------------------------------------------------

SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Accelerate numbers them from 1, too."""
FSDP_NOT_NEEDED = {
    "version": "it is FSDP2, torch's fully_shard",
    "backward_prefetch": "FSDP2 always gathers the next block during the backward of this one",
    "backward_prefetch_policy": "FSDP2 always gathers the next block during the backward of this one",
    "forward_prefetch": "FSDP2 gathers the next block as soon as the CPU has got there",
    "use_orig_params": "FSDP2 always keeps your parameters and their names",
    "state_dict_type": "every process writes its part; a checkpoint is read under any strategy, "
    "and trainer checkpoint export writes one file",
    "cpu_ram_efficient_loading": "build the layers in configure_model: no process ever holds the whole model",
    "sync_module_states": "all processes begin with rank 0's values",
    "limit_all_gathers": "FSDP2 limits them by itself",
}


def _fsdp(translation: MigrationReport, given: dict[str, Any]) -> None:
    whole = any(str(given.get(key)).upper() in ("NO_SHARD", "3") for key in _SHARDING_KEYS)
    for full, value in given.items():
        key, name = full.removeprefix("fsdp_"), f"fsdp_config.{full}"
        if whole and full not in _SHARDING_KEYS and key != "activation_checkpointing":
            translation.not_needed(name, value, "nothing is divided, with NO_SHARD")
        elif key in ("sharding_strategy", "reshard_after_forward"):
            _sharding(translation, value, name)
        elif key == "offload_params" or key == "cpu_offload":
            if flag(value):
                translation.taken(name, value, translation.draft.argument("cpu_offload", True))
            else:
                translation.not_needed(name, value, "nothing is offloaded, which is the default")
        elif key in ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_to_wrap", "min_num_params"):
            _wrapping(translation, key, value, name, given)
        elif key == "activation_checkpointing":
            if flag(value):
                why = f"{RECOMPUTE}, block by block"
                translation.taken(name, value, translation.draft.set("activation_checkpointing", "auto", why))
            else:
                translation.not_needed(name, value, "it is off")
        elif key in ("ignored_modules", "activation_checkpointing_offload") and value not in (None, "", False):
            words = {
                "ignored_modules": "nothing can be left out of the division; --trainer.strategy ddp divides nothing",
                "activation_checkpointing_offload": "activations are computed again, not offloaded",
            }
            translation.impossible(name, value, words[key])
        elif key in ("ignored_modules", "activation_checkpointing_offload"):
            translation.not_needed(name, value, "it is off")
        elif key in FSDP_NOT_NEEDED:
            translation.not_needed(name, value, FSDP_NOT_NEEDED[key])
        else:
            translation.impossible(name, value, UNKNOWN.format(close=did_you_mean(full, _FSDP_KEYS)))


_SHARDING_KEYS = (
    *("fsdp_sharding_strategy", "fsdp_reshard_after_forward"),
    *("sharding_strategy", "reshard_after_forward"),
)


def _sharding(translation: MigrationReport, value: Any, name: str) -> None:
    draft = translation.draft
    which = number(value)
    text = str(value).upper()
    if which is not None and not isinstance(value, bool) and 1 <= which <= len(SHARDINGS):
        text = SHARDINGS[int(which) - 1]
    if text in ("TRUE", "FULL_SHARD"):
        translation.not_needed(name, value, "FULL_SHARD is the default: weights are given back after the forward")
    elif text == "FALSE":
        translation.taken(name, value, draft.argument("reshard_after_forward", False))
    elif text == "NO_SHARD":
        words = "every process has the whole model; gradients are averaged"
        translation.taken(name, value, draft.line("strategy: ddp", words))
    elif text == "HYBRID_SHARD_ZERO2":
        lines = [draft.argument("sharding_strategy", "HYBRID_SHARD"), draft.argument("reshard_after_forward", False)]
        translation.taken(name, value, ", ".join(lines))
    elif text in SHARDINGS:
        translation.taken(name, value, draft.argument("sharding_strategy", text))
    else:
        translation.impossible(name, value, f"none of {', '.join(SHARDINGS)}; FULL_SHARD is written")


def _wrapping(translation: MigrationReport, key: str, value: Any, name: str, given: dict[str, Any]) -> None:
    draft = translation.draft
    policy = str(given.get("fsdp_auto_wrap_policy", given.get("auto_wrap_policy", ""))).upper()
    if value in (None, ""):
        translation.not_needed(name, value, "nothing is given: the repeated blocks are found by themselves")
    elif key == "auto_wrap_policy" and policy == "NO_WRAP":
        words = "it would gather all weights at once, and save little: the repeated blocks are found by themselves"
        translation.not_needed(name, value, words)
    elif key == "auto_wrap_policy":
        translation.not_needed(name, value, "auto_wrap_policy of the strategy: names, a number, or found by itself")
    elif key == "min_num_params":
        size = int(number(value) or 0)
        if size > 0 and policy in ("SIZE_BASED_WRAP", ""):
            translation.taken(name, value, draft.argument("auto_wrap_policy", size))
        else:
            translation.not_needed(name, value, f"{policy or 'no policy'} does not read it")
    elif policy in ("TRANSFORMER_BASED_WRAP", ""):
        names = value if isinstance(value, list) else [word.strip() for word in str(value).split(",")]
        translation.taken(name, value, draft.argument("auto_wrap_policy", names))
    else:
        translation.not_needed(name, value, f"{policy} does not read it")


_FSDP_KEYS = [
    f"fsdp_{key}"
    for key in (
        *("sharding_strategy", "reshard_after_forward", "offload_params", "auto_wrap_policy", "min_num_params"),
        *("transformer_layer_cls_to_wrap", "activation_checkpointing", "ignored_modules", *FSDP_NOT_NEEDED),
    )
]

# -- DeepSpeed ---------------------------------------------------------------------------------------------------------

DEEPSPEED_LAUNCH = {
    "deepspeed_multinode_launcher": "trainer launch, torchrun or srun on each machine; nothing logs in to others",
    "deepspeed_hostfile": "start the command on each of these machines: trainer launch --nnodes ... --rdzv ...",
    "deepspeed_inclusion_filter": "start the command on the machines that are meant; GPUs by devices",
    "deepspeed_exclusion_filter": "start the command on the machines that are meant; GPUs by devices",
}
DEEPSPEED_NOT_NEEDED = {
    "zero3_init_flag": "layers that configure_model builds are divided as they come to be",
    "zero3_save_16bit_model": "checkpoints hold the whole weights: trainer checkpoint export --dtype bfloat16",
}
DEEPSPEED_IMPOSSIBLE = {
    "deepspeed_moe_layer_cls_names": "leaf modules are not set by name: call "
    "deepspeed.utils.set_z3_leaf_modules in configure_model",
    "enable_msamp": "MS-AMP is not supported; precision: bf16-mixed",
    "msamp_opt_level": "MS-AMP is not supported; precision: bf16-mixed",
}


def _deepspeed(translation: MigrationReport, given: dict[str, Any]) -> None:
    draft = translation.draft
    for key, value in given.items():
        name = f"deepspeed_config.{key}"
        if key == "deepspeed_config_file":
            _file(translation, value, name)
        elif key == "zero_stage" and number(value) in (0, 1, 2, 3):
            stage = int(value)
            draft.argument("stage", stage)
            translation.taken(name, value, f"strategy: deepspeed_stage_{stage}" if stage else "strategy: ddp")
        elif key == "zero_stage":
            translation.impossible(name, value, "none of 0, 1, 2, 3; stage 2 is written")
        elif key in ("offload_optimizer_device", "offload_param_device"):
            argument = "offload_optimizer" if "optimizer" in key else "offload_parameters"
            if str(value).lower() in ("cpu", "nvme"):
                translation.taken(name, value, draft.argument(argument, str(value).lower()))
            else:
                translation.not_needed(name, value, "nothing is offloaded, which is the default")
        elif key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
            if str(value).lower() == "none":
                translation.not_needed(name, value, "nothing is given")
            else:
                translation.taken(name, value, draft.argument("nvme_path", value))
        elif key in ("gradient_accumulation_steps", "gradient_clipping"):
            _step(translation, key, value, name)
        elif key in DEEPSPEED_NOT_NEEDED:
            translation.not_needed(name, value, DEEPSPEED_NOT_NEEDED[key])
        elif key in DEEPSPEED_LAUNCH:
            translation.launched(name, value, DEEPSPEED_LAUNCH[key])
        elif key in DEEPSPEED_IMPOSSIBLE:
            off = value in (None, False, "", "no")
            (translation.not_needed if off else translation.impossible)(
                name, value, "it is off" if off else DEEPSPEED_IMPOSSIBLE[key]
            )
        else:
            known = [*DEEPSPEED_NOT_NEEDED, *DEEPSPEED_LAUNCH, "zero_stage", "deepspeed_config_file"]
            translation.impossible(name, value, UNKNOWN.format(close=did_you_mean(str(key), known)))
    finish(translation, {})


def _step(translation: MigrationReport, key: str, value: Any, name: str) -> None:
    if str(value).lower() in ("auto", "none"):
        translation.not_needed(name, value, "the trainer's own setting says it")
    elif key == "gradient_accumulation_steps":
        set_window(translation, name, value)
    else:
        set_clipping(translation, name, value)


def _file(translation: MigrationReport, value: Any, name: str) -> None:
    """The JSON that is named there, beside the configuration or where the command is typed."""
    if str(value).lower() == "none":
        translation.not_needed(name, value, "nothing is given")
        return
    candidates = [translation.source.parent / str(value), Path(str(value))]
    path = next((path for path in candidates if path.is_file()), candidates[0])
    findings = Diagnostics()
    tree = read_tree(str(path), findings)
    findings.report()
    assert tree is not None
    translation.taken(name, value, "it is read, see below")
    from_deepspeed(translation, tree.plain(), prefix=f"{path.name}: ")


# -- the others --------------------------------------------------------------------------------------------------------


def _dynamo(translation: MigrationReport, given: dict[str, Any]) -> None:
    backend = str(given.get("dynamo_backend", "NO")).lower()
    options: dict[str, Any] = {} if backend == "inductor" else {"backend": backend}
    for key, value in given.items():
        name, short = f"dynamo_config.{key}", key.removeprefix("dynamo_").removeprefix("use_")
        if backend == "no":
            translation.not_needed(name, value, "nothing is compiled, which is the default")
        elif short == "backend":
            translation.taken(name, value, "compile: true" if backend == "inductor" else f"compile.backend: {backend}")
        elif short == "mode" and value not in (None, "default"):
            options["mode"] = value
            translation.taken(name, value, f"compile.mode: {value}")
        elif short in ("fullgraph", "dynamic", "regional_compilation") and flag(value):
            option = "blocks" if short == "regional_compilation" else short
            options[option] = True
            translation.taken(name, value, f"compile.{option}: true")
        elif short in ("mode", "fullgraph", "dynamic", "regional_compilation"):
            translation.not_needed(name, value, "the default")
        else:
            translation.impossible(name, value, UNKNOWN.format(close=""))
    if backend != "no":
        translation.draft.set("compile", options or True, "torch.compile, in place")


def _parallelism(translation: MigrationReport, given: dict[str, Any]) -> None:
    sizes = {key.removeprefix("parallelism_config_"): value for key, value in given.items()}
    replicas, shards = (int(number(sizes.get(f"dp_{kind}_size")) or 1) for kind in ("replicate", "shard"))
    draft = translation.draft
    for full, value in given.items():
        key, name = full.removeprefix("parallelism_config_"), f"parallelism_config.{full}"
        if key in ("dp_replicate_size", "dp_shard_size"):
            if shards > 1 and replicas > 1:
                draft.argument("sharding_strategy", "HYBRID_SHARD")
                line = draft.argument("device_mesh", [replicas, shards])
                translation.taken(name, value, f"strategy.sharding_strategy: HYBRID_SHARD, {line}")
            elif shards > 1:
                translation.taken(name, value, "strategy: fsdp divides among all processes")
            else:
                translation.not_needed(name, value, "every process has the whole model: ddp")
        elif key in ("tp_size", "cp_size", "sp_size") and (number(value) or 1) > 1:
            words = "no tensor, context or sequence parallelism; fsdp with activation_checkpointing needs less memory"
            translation.impossible(name, value, words)
        else:
            translation.not_needed(name, value, "this kind of parallelism is off")
    if shards > 1:
        words = "weights, gradients and optimizer are divided among the processes"
        draft.line("strategy: fsdp", words)


MEGATRON_NOT_NEEDED = {
    "num_micro_batches": "of pipeline parallelism; accumulate_grad_batches makes larger steps",
    "use_distributed_optimizer": "fsdp divides the optimizer, too",
    "sequence_parallelism": "of tensor parallelism",
}


def _megatron(translation: MigrationReport, given: dict[str, Any]) -> None:
    for full, value in given.items():
        key, name = full.removeprefix("megatron_lm_"), f"megatron_lm_config.{full}"
        if key == "recompute_activations" and flag(value):
            line = translation.draft.set("activation_checkpointing", "auto", RECOMPUTE)
            translation.taken(name, value, line)
        elif key == "gradient_clipping" and number(value):
            set_clipping(translation, name, value)
        elif key in ("tp_degree", "pp_degree") and (number(value) or 1) > 1:
            translation.impossible(name, value, "no tensor or pipeline parallelism; strategy: fsdp divides the weights")
        elif key in MEGATRON_NOT_NEEDED:
            translation.not_needed(name, value, MEGATRON_NOT_NEEDED[key])
        elif (value is not True and value in (None, False, 1, "no", "false")) or key in (
            "recompute_activations",
            "gradient_clipping",
        ):
            translation.not_needed(name, value, "it is off")
        else:
            translation.impossible(name, value, "Megatron-LM's own; its model code is not used here")


def _fp8(translation: MigrationReport, given: dict[str, Any]) -> None:
    for key, value in given.items():
        words = "there is no fp8 here; its recipes belong to TransformerEngine, torchao and MS-AMP"
        translation.impossible(f"fp8_config.{key}", value, words)


def _mpirun(translation: MigrationReport, given: dict[str, Any]) -> None:
    for key, value in given.items():
        words = "mpirun's own: mpirun -n N --hostfile FILE trainer fit ... is joined by its variables"
        translation.launched(f"mpirun_config.{key}", value, words)


SECTIONS: dict[str, Callable[[MigrationReport, dict[str, Any]], None]] = {
    "fsdp_config": _fsdp,
    "deepspeed_config": _deepspeed,
    "dynamo_config": _dynamo,
    "parallelism_config": _parallelism,
    "megatron_lm_config": _megatron,
    "fp8_config": _fp8,
    "mpirun_config": _mpirun,
}
"""What is done with each section."""
