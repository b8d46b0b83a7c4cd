"""Translate an Accelerate configuration (`default_config.yaml`, with the keys of accelerate 1.15)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from trainer.arguments import local_path
from trainer.cli.config.draft import strategy_name
from trainer.cli.config.from_deepspeed import from_deepspeed, set_strategy
from trainer.cli.config.report import MigrationReport, flatten, is_off, number, read_plain, read_rows

ROWS = read_rows("""
main_training_function  - the configuration names a class (module), not a function
same_network            - machines meet at --rdzv, wherever they are
rdzv_backend            - it is always c10d
debug                   - a collective that not all processes make is always reported
distributed_type=?DEEPSPEED   = strategy: deepspeed_stage_..., see deepspeed_config
distributed_type=?elsewhere   - another key says more
distributed_type=?one_process = <strategy: single_device>
distributed_type=?processes   = <strategy: ddp> {line}, as there are several processes
distributed_type=?MULTI_GPU   = <strategy: ddp>
distributed_type=?MULTI_CPU   = <strategy: ddp, accelerator: cpu>
distributed_type=?FSDP        = <strategy: fsdp>
distributed_type=?XLA,?TPU    = <strategy: xla, accelerator: tpu>
distributed_type=?MEGATRON_LM = <strategy: fsdp>
distributed_type              ! <strategy: ddp> no strategy for these devices is tested here; {line} is written
mixed_precision=?turned_off ! deepspeed_config_file turns {value} off, which counts; Accelerate refuses both
mixed_precision=FP16    = <precision: 16-mixed> {line}{sums}
mixed_precision=BF16    = <precision: bf16-mixed> {line}{sums}
mixed_precision=FP8     = <precision: fp8> {line}, by torchao
mixed_precision=OFF     = <precision: 32-true>
mixed_precision         ! allowed are no, fp16, bf16, fp8; precision is left as it is
fp16=OFF,?mixed_precision - mixed_precision says it
fp16                    = <precision: 16-mixed>
num_processes=?XLA,?TPU - one process drives all TPU cores of a machine
num_processes=?unknown  ! no number from 1; devices is left at auto: one for each GPU
num_processes=?uneven   ! cannot be divided by {machines} machines; devices: {devices} is written
num_processes=?machines = devices: {devices} on each machine ({value} is the total of {machines})
num_processes           = devices: {devices}
num_machines=?machines  = <num_nodes: {machines}> {line}, and --nnodes {machines}
num_machines            - one machine is the default
machine_rank=?machines  > --node-rank {value}, on this machine. It can be left out: the machines are numbered by
                          themselves
machine_rank            - there is one machine
main_process_ip,main_process_port=?machines > --rdzv {address} | nothing is given
main_process_ip,main_process_port           - on one machine a free port is found | nothing is given
gpu_ids=?no_ids         - the first GPUs of the machine are used, as many as devices says
gpu_ids=?uneven_ids     ! <devices: {ids}> {count} GPUs, {devices} processes; {line} is written
gpu_ids=?cpu            - <devices: {count}> it runs on the CPU
gpu_ids                 = <devices: {ids}>
use_cpu                 = <accelerator: cpu> | GPUs are taken where there are any (accelerator: auto)
downcast_bf16           ! torch_xla no longer casts by itself; --trainer.precision bf16-true stores and computes in
                          bfloat16 | it is off
enable_cpu_affinity     ! put numactl before the command, or srun --cpu-bind | it is off
tpu_use_sudo            - for Accelerate's own start of a pod
tpu_env                 > set these variables before the command: {variables} | nothing is given
tpu_name,tpu_zone,tpu_vm,tpu_use_cluster  > gcloud compute tpus tpu-vm ssh {pod} --zone {zone} --worker=all --command
                                            'trainer fit ...' | nothing is given
commands,command_file   > run it on the TPU machines before the training, as you do now | nothing is given

[fsdp_config]
*=?not_fsdp             - distributed_type is {kind}, which does not read it
sharding_strategy,reshard_after_forward=TRUE,FULL_SHARD,1 - FULL_SHARD is the default: weights are freed after
                                                            the forward
sharding_strategy,reshard_after_forward=FALSE             = <strategy.reshard_after_forward: false>
sharding_strategy,reshard_after_forward=SHARD_GRAD_OP,2   = <strategy.sharding_strategy: SHARD_GRAD_OP>
sharding_strategy,reshard_after_forward=NO_SHARD,3        = <strategy: ddp>
sharding_strategy,reshard_after_forward=HYBRID_SHARD,4    = <strategy.sharding_strategy: HYBRID_SHARD>
sharding_strategy,reshard_after_forward=HYBRID_SHARD_ZERO2,5 = <strategy.sharding_strategy: HYBRID_SHARD,
                                                                strategy.reshard_after_forward: false>
sharding_strategy,reshard_after_forward  ! none of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD,
                                           HYBRID_SHARD_ZERO2; FULL_SHARD is written
activation_checkpointing         = <activation_checkpointing: auto> | it is off
*=?unsharded                     - nothing is sharded, with NO_SHARD
offload_params,cpu_offload       = <strategy.cpu_offload: true> | nothing is offloaded, which is the default
auto_wrap_policy=NO_WRAP         - it would gather all weights at once, and save little: the repeated blocks are
                                   found by themselves
auto_wrap_policy                 - auto_wrap_policy of the strategy: names, a number, or found by itself | {blocks}
min_num_params=?not_by_size      - {policy} does not read it | {blocks}
min_num_params=FROM_1            = <strategy.auto_wrap_policy: {integer}>
min_num_params                   - {policy} does not read it | {blocks}
transformer_layer_cls_to_wrap,transformer_cls_to_wrap=?not_by_class - {policy} does not read it | {blocks}
transformer_layer_cls_to_wrap,transformer_cls_to_wrap = <strategy.auto_wrap_policy: {classes}> | {blocks}
ignored_modules                  ! nothing can be left out of the sharding; strategy: ddp shards nothing | it is off
activation_checkpointing_offload ! activations are computed again, not offloaded | it is off
version                          - it is FSDP2, torch's fully_shard
backward_prefetch,backward_prefetch_policy - FSDP2 always gathers the next block during the backward of this one
forward_prefetch                 - FSDP2 gathers the next block as soon as the CPU has got there
use_orig_params                  - FSDP2 always keeps your parameters and their names
state_dict_type                  - every process writes its part; a checkpoint is read under any strategy, and trainer
                                   checkpoint export writes one file
cpu_ram_efficient_loading        - build the layers in configure_model, and give the strategy init_device: mixed
sync_module_states               - all processes begin with rank 0's values
limit_all_gathers                - FSDP2 limits them by itself

[deepspeed_config]
*=?not_deepspeed                     - distributed_type is {kind}, which does not read it
deepspeed_config_file                = it is read: its keys stand here, too | nothing is given
zero_stage=0                         = <strategy: ddp>
zero_stage=1,2,3                     = <strategy: deepspeed_stage_{value}>
zero_stage                           ! <strategy: deepspeed_stage_2> none of 0, 1, 2, 3; stage 2 is written
gradient_accumulation_steps=AUTO,NONE - the trainer's own setting says it
gradient_accumulation_steps=1,1.0    - one batch makes a step, which is the default
gradient_accumulation_steps=FROM_1   = <accumulate_grad_batches: {integer}>
gradient_accumulation_steps          ! it has to be an integer from 1; nothing is written
gradient_clipping=AUTO,NONE          - the trainer's own setting says it
gradient_clipping=POSITIVE           = <gradient_clip_val: {number}>
gradient_clipping                    ! it has to be a number above 0; nothing is written
offload_optimizer_device=CPU,NVME    = <strategy.offload_optimizer: {lower}>
offload_param_device=CPU,NVME        = <strategy.offload_parameters: {lower}>
offload_optimizer_device,offload_param_device - nothing is offloaded, which is the default
offload_optimizer_nvme_path,offload_param_nvme_path = <strategy.nvme_path: {json}> | nothing is given
zero3_init_flag                      - layers that configure_model builds are partitioned when it has ended
zero3_save_16bit_model               - checkpoints hold the full weights: trainer checkpoint export --dtype bfloat16
deepspeed_multinode_launcher         > trainer launch, torchrun or srun on each machine; nothing logs in to others
deepspeed_hostfile                   > start it on each of these machines: trainer launch --nnodes ... --rdzv ...
deepspeed_inclusion_filter,deepspeed_exclusion_filter > start it on the machines that are meant; GPUs by devices
deepspeed_moe_layer_cls_names        ! leaf modules are not set by name: call deepspeed.utils.set_z3_leaf_modules in
                                       configure_model | it is off
enable_msamp,msamp_opt_level         ! MS-AMP is not supported; precision: bf16-mixed | it is off

[dynamo_config]
*=?not_compiled         - nothing is compiled, which is the default
*=DEFAULT               - the default
backend=INDUCTOR        = <compile: {compile}> compile: true
backend                 = <compile: {compile}> compile.backend: {backend}
*=OFF                   - the default
mode                    = <compile: {compile}> compile.mode: {value}
use_fullgraph           = <compile: {compile}> compile.fullgraph: true
use_dynamic             = <compile: {compile}> compile.dynamic: true
use_regional_compilation = <compile: {compile}> compile.blocks: true

[parallelism_config]
dp_replicate_size,dp_shard_size=?hybrid = <strategy: fsdp, strategy.sharding_strategy: HYBRID_SHARD,
                                           strategy.device_mesh: {mesh}>
dp_replicate_size,dp_shard_size=?shards = <strategy: fsdp>
dp_replicate_size,dp_shard_size         - every process has the full model: ddp
tp_size=FROM_2          = <strategy: fsdp, strategy.tensor_parallel: {value}>
cp_size=FROM_2          = <strategy: fsdp, strategy.context_parallel: {value}>
sp_size=FROM_2          = <strategy: fsdp, strategy.context_parallel: {value}, strategy.context_exchange: heads>
tp_size,cp_size,sp_size=1,1.0,NONE - this kind of parallelism is off
tp_size,cp_size,sp_size ! it has to be an integer from 1; nothing is written | this kind of parallelism is off
cp_backend,sp_backend,cp_comm_strategy - the processes exchange heads where their number allows it, keys elsewhere
sp_seq_length,sp_seq_length_is_variable,sp_attn_implementation - sequences of any length are split
*                       - this kind of parallelism is off

[megatron_lm_config]
*=?not_megatron_lm      - distributed_type is {kind}, which does not read it
recompute_activations   = <activation_checkpointing: auto> | it is off
gradient_clipping=POSITIVE = <gradient_clip_val: {number}>
gradient_clipping       - it is off
tp_degree=FROM_2        = <strategy.tensor_parallel: {value}>
pp_degree=FROM_2        = <strategy.pipeline_parallel: {value}>
expert_model_parallel_size=FROM_2 = <strategy.expert_parallel: {value}>
context_parallel_size=FROM_2      = <strategy.context_parallel: {value}>
tp_degree,pp_degree,expert_model_parallel_size,context_parallel_size=1,1.0,NONE - it is off
tp_degree,pp_degree,expert_model_parallel_size,context_parallel_size ! it has to be an integer from 1; nothing is
                                                                       written | it is off
recompute_granularity=FULL,SELECTIVE = <activation_checkpointing: auto> | it is off
recompute_method,recompute_num_layers - activation_checkpointing: auto recomputes each repeated block | it is off
optimizer_cpu_offload   = <strategy.cpu_offload: true> | nothing is offloaded, which is the default
num_micro_batches=FROM_2 = <accumulate_grad_batches: {value}>
num_micro_batches       - of pipeline parallelism; accumulate_grad_batches makes larger steps
use_distributed_optimizer,use_custom_fsdp - fsdp shards the optimizer, too
sequence_parallelism    - of tensor parallelism
*                       ! Megatron-LM's own; its model code is not used here | it is off

[fp8_config]
enable_fsdp_float8_all_gather - under fsdp the weights of precision: fp8 are gathered in 8 bits
*                       ! of TransformerEngine, torchao, MS-AMP; fp8 has a scale for a tensor, fp8-rowwise for each row
[mpirun_config]
*                       > mpirun's own: mpirun -n N --hostfile FILE trainer fit ... is joined by its variables

[]
fsdp_config,deepspeed_config,dynamo_config,parallelism_config,megatron_lm_config,fp8_config,mpirun_config !
    it is not a section; ignored | it is empty
*=?sagemaker            ! SageMaker is not driven from here: let its PyTorch estimator start `torchrun -m trainer fit
                          --config ...`
compute_environment     - it is detected at the start: trainer env shows it
""")
SECTIONS = {
    **dict.fromkeys(("deepspeed_config", "fp8_config", "mpirun_config"), ""),
    **{f"{prefix}config": prefix for prefix in ("fsdp_", "dynamo_", "megatron_lm_")},
    "parallelism_config": "parallelism_config_",
}
"""Sections, with the prefix of their keys, which has no place in the rows."""
SUMS = "; gradients are summed in float32 (Accelerate: in this precision, strategy.reduce_dtype)"
COMPILE = {"mode": "mode", "use_fullgraph": "fullgraph", "use_dynamic": "dynamic", "use_regional_compilation": "blocks"}
"""Arguments of `compile` by key of dynamo_config."""


def from_accelerate(report: MigrationReport, given: Mapping[str, Any]) -> None:
    """Account for every key of an Accelerate configuration."""
    flat = flatten(given, SECTIONS)
    if "dynamo_backend" in flat:  # the spelling of older versions
        flat["dynamo_config.backend"] = flat.pop("dynamo_backend")
    report.given = {key: value for key, (_, value) in flat.items()}
    kind = str(report.given.get("distributed_type") or "NO").rpartition(".")[2].upper()
    _read_facts(report, kind)
    file, shown = report.given.get("deepspeed_config.deepspeed_config_file"), ""
    if kind == "DEEPSPEED" and not is_off(file):
        named = local_path(str(file))
        next_to = report.source.parent / named
        path = next_to if next_to.is_file() or not named.is_file() else named
        shown = f"{path.name}: "
        from_deepspeed(report, read_plain(path)[0], shown)
        report.decided = {**report.draft.settings, **{f"strategy.{k}": v for k, v in report.draft.arguments.items()}}
    report.translate(flat, ROWS, _flags(report, kind))
    if kind == "DEEPSPEED":
        if not shown:
            report.draft.settings.setdefault("strategy", strategy_name("zero2"))
        set_strategy(report, shown)


def _read_facts(report: MigrationReport, kind: str) -> None:
    """Read what several keys depend on."""
    given = report.given
    machines, devices = report.number("num_machines", 1), 1 if kind == "NO" else None
    total = number(given.get("num_processes")) or 0
    if total > 0 and kind not in ("XLA", "TPU"):
        devices = max(1, int(total) // machines)
    ids = str(given.get("gpu_ids", "")).split(",")
    classes = given.get("fsdp_config.transformer_layer_cls_to_wrap", given.get("fsdp_config.transformer_cls_to_wrap"))
    names = classes if isinstance(classes, list) else [word.strip() for word in str(classes).split(",")]
    variables = given.get("tpu_env")
    backend = str(given.get("dynamo_config.backend", "no")).lower()
    options: dict[str, Any] = {} if backend == "inductor" else {"backend": backend}
    for key, name in COMPILE.items():
        value = given.get(f"dynamo_config.{key}")
        if not is_off(value) and str(value).lower() != "default":
            options[name] = value if key == "mode" else True
    report.facts = {
        "kind": kind,
        "machines": machines,
        "devices": devices,
        "address": f"{given.get('main_process_ip') or 'HOST'}:{report.number('main_process_port', 29500)}",
        "ids": [int(word) for word in ids] if all(word.strip().isdecimal() for word in ids) else [],
        "count": len(ids),
        "sums": SUMS if kind == "FSDP" else "",
        "variables": " ".join(map(str, variables if isinstance(variables, list) else [variables])),
        "pod": shlex.quote(str(given.get("tpu_name") or given.get("tpu_vm") or "NAME")),
        "zone": given.get("tpu_zone") or "ZONE",
        "blocks": "nothing is given: the repeated blocks are found by themselves",
        "policy": str(given.get("fsdp_config.auto_wrap_policy") or "").upper() or "no policy",
        "classes": json.dumps(names),
        "backend": backend,
        "compile": json.dumps(options or True),
        "mesh": [report.number(f"parallelism_config.dp_{name}_size", 1) for name in ("replicate", "shard")],
    }
    if devices is not None and not report.facts["ids"]:
        report.draft.set("devices", devices)


def _flags(report: MigrationReport, kind: str) -> list[str]:
    """Return the flags that are up; one of them is the `distributed_type`, in upper case."""
    given, facts = report.given, report.facts
    machines, devices = facts["machines"], facts["devices"]
    replicas, shards = facts["mesh"]
    half = str(given.get("mixed_precision")).lower()
    unsharded = str(given.get("fsdp_config.sharding_strategy")).upper() in ("NO_SHARD", "3")
    several = (devices or 1) * machines > 1
    flags = {
        kind: True,
        "not_fsdp": kind != "FSDP",
        "not_deepspeed": kind != "DEEPSPEED",
        "not_megatron_lm": kind != "MEGATRON_LM",
        "sagemaker": str(given.get("compute_environment", "")).endswith("SAGEMAKER"),
        "elsewhere": shards > 1 or (kind == "FSDP" and unsharded),
        "one_process": kind == "NO" and not several,
        "processes": kind == "NO" and several,
        "machines": machines > 1,
        "unknown": devices is None,
        "uneven": devices is not None and number(given.get("num_processes")) != devices * machines,
        "no_ids": not facts["ids"],
        "uneven_ids": devices not in (None, len(facts["ids"])),
        "cpu": not is_off(given.get("use_cpu")),
        "mixed_precision": "mixed_precision" in given,
        "turned_off": half in ("fp16", "bf16") and given.get(f"{half}.enabled") is False,
        "unsharded": unsharded,
        "not_by_size": facts["policy"] not in ("SIZE_BASED_WRAP", "no policy"),
        "not_by_class": facts["policy"] not in ("TRANSFORMER_BASED_WRAP", "no policy"),
        "not_compiled": facts["backend"] == "no",
        "hybrid": replicas > 1 and shards > 1,
        "shards": shards > 1,
    }
    return [name for name, is_up in flags.items() if is_up]
