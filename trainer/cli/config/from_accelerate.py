"""Translate an Accelerate configuration (`default_config.yaml`, with the keys of accelerate 1.15)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.arguments import flat_names, local_path
from trainer.cli.config.draft import strategy_name
from trainer.cli.config.from_deepspeed import COPIES, OFFLOAD, STAGE, from_deepspeed
from trainer.cli.config.translation import (
    BY_HAND,
    LEFT_OUT,
    TAKEN,
    Reader,
    Translation,
    account,
    is_off,
    names,
    number,
    one_of,
    read_plain,
    several,
    text,
    whole,
)
from trainer.errors import did_you_mean

SHARDS, ONE, TPU = strategy_name("shards"), strategy_name("one"), strategy_name("tpu")
STRATEGIES = {"NO": ONE, "FSDP": SHARDS, "MEGATRON_LM": SHARDS, "XLA": TPU, "TPU": TPU}
"""Strategies by `distributed_type`; DEEPSPEED takes the stage's, and all others copies."""
SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
"""Sections that only one `distributed_type` reads."""
_AUTO = one_of(true="auto", full="auto", selective="auto")
_TRUE = one_of(true=True)
_SHARDING = one_of(shard_grad_op="SHARD_GRAD_OP", _2="SHARD_GRAD_OP", hybrid_shard="HYBRID_SHARD", _4="HYBRID_SHARD")
SETTINGS: dict[str, tuple[str, Reader]] = {
    "mixed_precision": ("precision", one_of(no="32-true", fp16="16-mixed", bf16="bf16-mixed", fp8="fp8")),
    "num_machines": ("num_nodes", several),
    "use_cpu": ("accelerator", one_of(true="cpu")),
    "fsdp_config.fsdp_sharding_strategy": ("strategy.sharding_strategy", _SHARDING),
    "fsdp_config.fsdp_reshard_after_forward": ("strategy.reshard_after_forward", one_of(false=False)),
    "fsdp_config.fsdp_activation_checkpointing": ("activation_checkpointing", _AUTO),
    "fsdp_config.fsdp_offload_params": ("strategy.cpu_offload", _TRUE),
    "fsdp_config.fsdp_min_num_params": ("strategy.auto_wrap_policy", whole),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": ("strategy.auto_wrap_policy", names),
    "deepspeed_config.zero_stage": ("strategy", STAGE),
    "deepspeed_config.gradient_accumulation_steps": ("accumulate_grad_batches", whole),
    "deepspeed_config.gradient_clipping": ("gradient_clip_val", number),
    "deepspeed_config.offload_optimizer_device": ("strategy.offload_optimizer", OFFLOAD),
    "deepspeed_config.offload_param_device": ("strategy.offload_parameters", OFFLOAD),
    "deepspeed_config.offload_optimizer_nvme_path": ("strategy.nvme_path", text),
    "deepspeed_config.offload_param_nvme_path": ("strategy.nvme_path", text),
    "dynamo_config.dynamo_backend": (
        "compile.backend",
        one_of(inductor="inductor", eager="eager", cudagraphs="cudagraphs"),
    ),
    "dynamo_config.dynamo_mode": ("compile.mode", text),
    "dynamo_config.dynamo_use_fullgraph": ("compile.fullgraph", _TRUE),
    "dynamo_config.dynamo_use_dynamic": ("compile.dynamic", _TRUE),
    "dynamo_config.dynamo_use_regional_compilation": ("compile.blocks", _TRUE),
    "parallelism_config.parallelism_config_tp_size": ("strategy.tensor_parallel", several),
    "parallelism_config.parallelism_config_cp_size": ("strategy.context_parallel", several),
    "megatron_lm_config.megatron_lm_recompute_activations": ("activation_checkpointing", _AUTO),
    "megatron_lm_config.megatron_lm_recompute_granularity": ("activation_checkpointing", _AUTO),
    "megatron_lm_config.megatron_lm_optimizer_cpu_offload": ("strategy.cpu_offload", _TRUE),
    "megatron_lm_config.megatron_lm_gradient_clipping": ("gradient_clip_val", number),
    "megatron_lm_config.megatron_lm_num_micro_batches": ("accumulate_grad_batches", several),
    "megatron_lm_config.megatron_lm_tp_degree": ("strategy.tensor_parallel", several),
    "megatron_lm_config.megatron_lm_pp_degree": ("strategy.pipeline_parallel", several),
    "megatron_lm_config.megatron_lm_expert_model_parallel_size": ("strategy.expert_parallel", several),
    "megatron_lm_config.megatron_lm_context_parallel_size": ("strategy.context_parallel", several),
}
"""A key -> our setting, and the reader of its values."""
_POD = BY_HAND, "gcloud compute tpus tpu-vm ssh NAME --worker=all --command 'trainer fit ...'"
_BEFORE = BY_HAND, "run it on the TPU machines before the training, as you do now"
_MEET = LEFT_OUT, "machines meet at --rdzv, wherever they are: see the last line"
WORDS: dict[str, tuple[str, str]] = {
    "downcast_bf16": (BY_HAND, "--trainer.precision bf16-true stores and computes in bfloat16"),
    "enable_cpu_affinity": (BY_HAND, "put numactl before the command, or srun --cpu-bind"),
    "tpu_env": (BY_HAND, "set these variables before the command"),
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm", "tpu_use_sudo", "tpu_use_cluster"), _POD),
    **dict.fromkeys(("commands", "command_file"), _BEFORE),
    "debug": (LEFT_OUT, "a collective that not all processes make is always reported"),
    "main_training_function": (LEFT_OUT, "the configuration names a class (module), not a function"),
    **dict.fromkeys(("same_network", "rdzv_backend", "main_process_ip", "main_process_port"), _MEET),
    "machine_rank": (LEFT_OUT, "the machines are numbered automatically; or --node-rank N"),
    "compute_environment": (LEFT_OUT, "it is detected at the start: trainer env shows it"),
    "fsdp_config.fsdp_ignored_modules": (BY_HAND, "nothing can be left out of the sharding; strategy: ddp"),
    "fsdp_config.fsdp_auto_wrap_policy": (LEFT_OUT, "the repeated blocks are found, or named by another key"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": (LEFT_OUT, "layers of configure_model, with init_device: mixed"),
    **dict.fromkeys(
        (
            *("fsdp_config.fsdp_version", "fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_forward_prefetch"),
            *("fsdp_config.fsdp_use_orig_params", "fsdp_config.fsdp_sync_module_states"),
            *("fsdp_config.fsdp_limit_all_gathers", "fsdp_config.fsdp_state_dict_type"),
        ),
        (LEFT_OUT, "FSDP2 does it automatically; checkpoints are readable under any strategy"),
    ),
    "deepspeed_config.deepspeed_multinode_launcher": (BY_HAND, "trainer launch, torchrun or srun on each machine"),
    "deepspeed_config.deepspeed_hostfile": (BY_HAND, "start it on each: trainer launch --nnodes ... --rdzv ..."),
    "deepspeed_config.zero3_init_flag": (LEFT_OUT, "layers that configure_model builds are partitioned after it"),
    "deepspeed_config.zero3_save_16bit_model": (LEFT_OUT, "trainer checkpoint export --dtype bfloat16"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": (BY_HAND, "deepspeed.utils.set_z3_leaf_modules(...)"),
    "parallelism_config": (LEFT_OUT, "the strategy decides it"),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": (LEFT_OUT, "fsdp shards the optimizer, too"),
    "megatron_lm_config": (BY_HAND, "of Megatron-LM's own model code, which is not used here"),
    "fp8_config": (BY_HAND, "of other packages: precision fp8 has a scale for a tensor, fp8-rowwise for each row"),
    "mpirun_config": (BY_HAND, "mpirun -n N --hostfile FILE trainer fit ... is joined by its variables"),
}
"""A key or section -> its kind of translation, and what to say."""


def from_accelerate(done: Translation, given: Mapping[str, Any]) -> None:
    """Account for every key of an Accelerate configuration."""
    flat = flat_names(given, ".")
    kind = str(flat.get("distributed_type") or "NO").rpartition(".")[2].upper()
    file = flat.pop("deepspeed_config.deepspeed_config_file", None)
    if kind == "DEEPSPEED" and not is_off(file):
        _read_json(done, str(file))
    _take_processes(done, flat, kind)
    _take_strategy(done, flat, kind)
    read = {section: reader == kind for section, reader in SECTIONS.items()}
    read["fsdp_config"] &= done.draft.settings.get("strategy") != COPIES
    read["dynamo_config"] = not is_off(flat.get("dynamo_config.dynamo_backend"))
    for key, value in flat.items():
        if not read.get(key.partition(".")[0], True):
            done.add(key, value, LEFT_OUT, f"distributed_type is {kind}, which does not read it, or it is off")
        elif not account(done, key, value, SETTINGS, WORDS):
            close = did_you_mean(key, [*SETTINGS, *WORDS])
            done.add(key, value, BY_HAND, f"not a key of accelerate 1.15.{close}")
    if kind == "DEEPSPEED":
        done.draft.settings.setdefault("strategy", strategy_name("zero2"))


def _read_json(done: Translation, file: str) -> None:
    """Translate the DeepSpeed JSON that the file names, whose settings count."""
    named = local_path(file)
    next_to = done.source.parent / named
    path = next_to if next_to.is_file() else named
    done.add("deepspeed_config.deepspeed_config_file", file, TAKEN, "its keys stand here, too")
    from_deepspeed(done, read_plain(path)[0], f"{path.name}: ")


def _take_processes(done: Translation, flat: dict[str, Any], kind: str) -> None:
    """Take the numbers of machines and processes, and the GPUs."""
    done.machines = whole(flat.get("num_machines")) or 1
    done.address = f"{flat.get('main_process_ip') or 'HOST'}:{flat.get('main_process_port') or 29500}"
    total, ids = flat.pop("num_processes", None), str(flat.pop("gpu_ids", "all"))
    each = (whole(total) or 0) // done.machines
    if kind in ("XLA", "TPU"):
        done.add("num_processes", total, LEFT_OUT, "one process drives all TPU cores of a machine")
    elif each * done.machines != whole(total):
        words = f"it cannot be divided by {done.machines} machines: give devices, the processes of a machine"
        done.add("num_processes", total, BY_HAND, words)
    elif ids.replace(",", "").isdigit():
        done.add("num_processes", total, LEFT_OUT, "gpu_ids says it")
        done.take("gpu_ids", ids, {"devices": [int(one) for one in ids.split(",")]})
    else:
        words = f" on each machine ({total} is the total of {done.machines})"
        done.take("num_processes", total, {"devices": each}, words)
        done.add("gpu_ids", ids, LEFT_OUT, "the first GPUs of the machine are used, as many as devices says")


def _take_strategy(done: Translation, flat: dict[str, Any], kind: str) -> None:
    """Take the strategy, and the classes of layers that it shards."""
    section = "parallelism_config.parallelism_config_"
    names_of_degrees = ("tp", "cp", "sp", "dp_shard", "dp_replicate")
    degrees = {name: whole(flat.get(f"{section}{name}_size")) or 1 for name in names_of_degrees}
    replicas, shards = degrees.pop("dp_replicate"), degrees["dp_shard"]
    strategy = STRATEGIES.get(kind, COPIES)
    if max(degrees.values()) > 1:
        strategy = SHARDS
    if str(flat.get("fsdp_config.fsdp_sharding_strategy")).lower() in ("no_shard", "3"):
        strategy = COPIES
    if strategy == ONE and done.draft.settings.get("devices") != 1:
        strategy = COPIES
    value = flat.pop("distributed_type", None)
    if kind == "DEEPSPEED":
        done.add("distributed_type", value, TAKEN, "strategy: deepspeed_stage_..., see deepspeed_config")
    else:
        done.take("distributed_type", value, {"strategy": strategy})
    if kind in ("XLA", "TPU"):
        done.draft.set("accelerator", "tpu")
    if replicas > 1 and shards > 1:
        mesh = {"strategy.sharding_strategy": "HYBRID_SHARD", "strategy.device_mesh": [replicas, shards]}
        done.take(f"{section}dp_replicate_size", flat.pop(f"{section}dp_replicate_size"), mesh)
    if degrees["sp"] > 1:
        heads = {"strategy.context_parallel": degrees["sp"], "strategy.context_exchange": "heads"}
        done.take(f"{section}sp_size", flat.pop(f"{section}sp_size"), heads)
