"""Configuration files of other programs, from their documentation or written by accelerate 1.15."""

from __future__ import annotations

ZERO_2 = """\
{
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "fp16": {
        "enabled": true,
        "loss_scale": 0,
        "loss_scale_window": 1000
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": true,
        "allgather_bucket_size": 5e8,
        "reduce_scatter": true,
        "reduce_bucket_size": 5e8,
        "overlap_comm": true,
        "contiguous_gradients": true
    }
}
"""
ZERO_3 = """\
{
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "fp16": {
        "enabled": true
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
    }
}
"""
OFFLOAD = """\
{
  "fp16": {"enabled": false},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu"},
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8
  }
}
"""
DEEPSPEED = {"zero2.json": ZERO_2, "zero3.json": ZERO_3, "deepspeed_config.json": OFFLOAD}

COMMON = """\
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: false
enable_cpu_affinity: false
main_training_function: main
rdzv_backend: static
same_network: false
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""Lines that accelerate writes into every file."""

ONE = """\
distributed_type: 'NO'
machine_rank: 0
mixed_precision: 'no'
num_machines: 1
num_processes: 1
"""
GPUS = """\
distributed_type: MULTI_GPU
gpu_ids: all
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: bf16
num_machines: 2
num_processes: 8
"""
FSDP = """\
distributed_type: FSDP
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: false
  dynamo_use_regional_compilation: true
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
PLUGIN = """\
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
machine_rank: 0
mixed_precision: fp16
num_machines: 1
num_processes: 4
"""
WITH_JSON = """\
deepspeed_config:
  deepspeed_config_file: zero2.json
  zero3_init_flag: false
distributed_type: DEEPSPEED
machine_rank: 0
num_machines: 1
num_processes: 4
"""
TPU = """\
commands:
- echo hi
distributed_type: XLA
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 8
tpu_env:
- A=1
tpu_name: pod
tpu_zone: us-central1-a
"""
FP8 = """\
distributed_type: MULTI_GPU
fp8_config:
  backend: TE
  fp8_format: HYBRID
  override_linear_precision:
  - false
  - false
  - false
gpu_ids: 0,2
machine_rank: 0
mixed_precision: fp8
num_machines: 1
num_processes: 2
"""
MEGATRON = """\
distributed_type: MEGATRON_LM
machine_rank: 0
megatron_lm_config:
  megatron_lm_context_parallel_size: 2
  megatron_lm_expert_model_parallel_size: 2
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 4
  megatron_lm_recompute_activations: false
  megatron_lm_recompute_granularity: selective
  megatron_lm_recompute_method: uniform
  megatron_lm_tp_degree: 4
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_machines: 1
num_processes: 32
"""
HYBRID = """\
distributed_type: MULTI_GPU
machine_rank: 0
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 1
"""
ACCELERATE = {
    name: COMMON + text
    for name, text in {
        "one.yaml": ONE,
        "gpus.yaml": GPUS,
        "fsdp.yaml": FSDP,
        "plugin.yaml": PLUGIN,
        "with_json.yaml": WITH_JSON,
        "tpu.yaml": TPU,
        "fp8.yaml": FP8,
        "megatron.yaml": MEGATRON,
        "hybrid.yaml": HYBRID,
    }.items()
}
