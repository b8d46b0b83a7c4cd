"""Accelerate's public names and what to use instead: tables in strings only, of the text after "Use".

`docs/accelerate-names.md` is made of them, by `page`; a test compares them with the installed Accelerate.
"""

from __future__ import annotations

_PARALLEL = "FSDPStrategy(tensor_parallel=, context_parallel=, pipeline_parallel=, expert_parallel=)"
_OF_TRAINER_STRATEGIES = "of trainer.strategies"
_DEEPSPEED = f"strategy=DeepSpeedStrategy(...) {_OF_TRAINER_STRATEGIES}"
_LOGGERS = "logger=TensorBoardLogger(), WandbLogger(), MLFlowLogger() or CSVLogger() of trainer.callbacks"
_OWN_LOGGER = "a logger of your own, if engine.is_global_zero; loggers belong to a Trainer"
_ANY_LOADER = "nothing: a run continues at its next batch with any loader"
_ORDER = "nothing: the order of samples follows from the seed and the epoch"
_KWARGS = "options of the strategy, such as DDPStrategy(find_unused_parameters=True)"
_ONE_STEP_EACH = "nothing: 'interval' and 'frequency' of configure_optimizers say when a scheduler steps"
_FP8 = "precision='fp8', 'fp8-rowwise' or 'mxfp8', computed by torchao"
_PROFILER = "callbacks=[TorchProfiler(...)]"

_LOADER_CONFIGURATION = {
    "split_batches": "a DataLoader with the batch_size of one process",
    "dispatch_batches": "nothing: each process reads its part of the data",
    "even_batches": "nothing: evaluations count every sample once, and uneven training batches count by their size",
    **dict.fromkeys(("use_seedable_sampler", "rng_types"), _ORDER),
    "data_seed": "seed=",
    "non_blocking": "DataLoader(pin_memory=True): batches are then copied during the step",
    "use_stateful_dataloader": _ANY_LOADER,
}

_SHARED_ARGUMENTS = {
    "cpu": "accelerator='cpu'",
    **_LOADER_CONFIGURATION,
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins"), _DEEPSPEED),
    "fsdp_plugin": f"strategy=FSDPStrategy(...) {_OF_TRAINER_STRATEGIES}",
    "torch_tp_plugin": f"strategy=FSDPStrategy(tensor_parallel=N) {_OF_TRAINER_STRATEGIES}",
    **dict.fromkeys(("megatron_lm_plugin", "parallelism_config"), f"strategy={_PARALLEL} {_OF_TRAINER_STRATEGIES}"),
    "kwargs_handlers": _KWARGS,
    **dict.fromkeys(("fp8_recipe", "fp8_backend", "fp8_recipe_handler"), _FP8),
}
"""The arguments that are answered alike for a Trainer and an Engine."""

TRAINER_ARGUMENTS = {
    "device_placement": "nothing: the module and its batches are moved to trainer.device",
    "mixed_precision": "precision='16-mixed' or 'bf16-mixed'",
    "gradient_accumulation_steps": "accumulate_grad_batches=",
    "gradient_accumulation_plugin": "accumulate_grad_batches=",
    "dataloader_config": "options of your DataLoader; see the page 'data'",
    **_SHARED_ARGUMENTS,
    "log_with": _LOGGERS,
    **dict.fromkeys(("project_dir", "project_config", "logging_dir"), "default_root_dir="),
    "step_scheduler_with_optimizer": _ONE_STEP_EACH,
    **dict.fromkeys(("dynamo_backend", "dynamo_plugin"), "compile="),
}
"""Arguments of `Accelerator`, and of `DataLoaderConfiguration`, which it had before -> for a Trainer."""

ENGINE_ARGUMENTS = {
    "device_placement": "nothing: setup moves modules, and loaders move their batches, to engine.device",
    "mixed_precision": "precision='bf16-mixed' or '16-mixed'",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation_plugin"),
        "engine.no_backward_sync(model, enabled=...) around forward and backward",
    ),
    "dataloader_config": "options of your DataLoader",
    **_SHARED_ARGUMENTS,
    "even_batches": "nothing: engine.setup_dataloaders(loader, training=False) gives every sample once",
    **dict.fromkeys(("log_with", "project_dir", "project_config", "logging_dir"), _OWN_LOGGER),
    "step_scheduler_with_optimizer": "scheduler.step() in the loop",
    **dict.fromkeys(("dynamo_backend", "dynamo_plugin"), "torch.compile(module) before engine.setup"),
}
"""The same -> for an Engine."""

_CHECKPOINTS = "trainer.full_state_dict(), or `trainer checkpoint export`: checkpoints are readable anywhere"
_CHECKPOINTING = "Trainer(activation_checkpointing=...)"
_ACCUMULATION = "Trainer(accumulate_grad_batches=N)"
_CLIPPING = "Trainer(gradient_clip_val=...)"

FSDP_OPTIONS = {
    "fsdp_version": "nothing: it is FSDP2, torch's fully_shard",
    **dict.fromkeys(("state_dict_type", "state_dict_config", "optim_state_dict_config"), _CHECKPOINTS),
    **dict.fromkeys(
        ("backward_prefetch", "forward_prefetch", "limit_all_gathers"),
        "nothing: FSDP2 gathers the next block during the current one, and limits how many",
    ),
    "use_orig_params": "nothing: FSDP2 always keeps your parameters and their names",
    **dict.fromkeys(("mixed_precision_policy", "mp_policy"), "Trainer(precision=...), and reduce_dtype= for gradients"),
    **dict.fromkeys(("offload_policy", "offload_params"), "cpu_offload="),
    **dict.fromkeys(("ignored_modules", "ignored_params"), "strategy='ddp': no module can be left out of the sharding"),
    "param_init_fn": "configure_model, where the module builds its layers, and init_device=",
    "sync_module_states": "nothing: all processes begin with the same weights",
    "cpu_ram_efficient_loading": "init_device='mixed', with the layers built in configure_model",
    **dict.fromkeys(("transformer_cls_names_to_wrap", "transformer_layer_cls_to_wrap"), "auto_wrap_policy=['Block']"),
    "min_num_params": "auto_wrap_policy=N",
    "activation_checkpointing": _CHECKPOINTING,
    "activation_checkpointing_offload": f"{_CHECKPOINTING}: activations are computed again, and not offloaded",
    "mesh": "device_mesh=",
}
"""Options of `FullyShardedDataParallelPlugin` and `fully_shard` -> for FSDPStrategy."""

DEEPSPEED_OPTIONS = {
    "hf_ds_config": "config=",
    "zero_stage": "stage=",
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_clipping": _CLIPPING,
    "offload_optimizer_device": "offload_optimizer=",
    "offload_param_device": "offload_parameters=",
    **dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path"), "nvme_path="),
    "zero3_init_flag": "configure_model, whose layers stage 3 partitions, and init_device=",
    "zero3_save_16bit_model": "`trainer checkpoint export --dtype bfloat16`: checkpoints hold the full weights",
    "transformer_moe_cls_names": "deepspeed.utils.set_z3_leaf_modules(...) in configure_model",
    "moe_layer_cls_names": "deepspeed.utils.set_z3_leaf_modules(...) in configure_model",
}
"""Options of `DeepSpeedPlugin` -> for DeepSpeedStrategy."""

PARALLEL_OPTIONS = {
    **dict.fromkeys(("tp_degree", "tp_size"), "tensor_parallel="),
    "pp_degree": "pipeline_parallel=",
    **dict.fromkeys(("context_parallel_size", "cp_size"), "context_parallel="),
    "sp_size": "context_parallel=, context_exchange='heads'",
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), "expert_parallel="),
    **dict.fromkeys(("dp_replicate_size", "dp_shard_size"), "sharding_strategy='HYBRID_SHARD', device_mesh=(2, 4)"),
    **dict.fromkeys(("cp_backend", "sp_backend", "cp_comm_strategy", "cp_handler", "sp_handler"), "context_exchange="),
    "tp_handler": "tensor_parallel_plan of the module",
    "sequence_parallelism": "tensor_parallel=, and the plan's styles such as 'sequence_parallel'",
    "num_micro_batches": _ACCUMULATION,
    **dict.fromkeys(("recompute_activations", "recompute_granularity"), _CHECKPOINTING),
    "use_distributed_optimizer": "nothing: FSDPStrategy shards weights, gradients and the optimizer's state",
    "optimizer_cpu_offload": "cpu_offload=",
}
"""Options of `MegatronLMPlugin`, `ParallelismConfig` and its handlers -> for FSDPStrategy."""

STRATEGY_OPTIONS = {
    **PARALLEL_OPTIONS,
    **DEEPSPEED_OPTIONS,
    **FSDP_OPTIONS,
    "comm_wrapper": "comm_hook=, with a function that calls the other",
    "comm_state_option": "comm_hook_state=",
    **dict.fromkeys(("backend", "init_method"), "nothing: gloo on CPUs, and NCCL too on GPUs"),
    "timeout": "timeout_seconds=",
}
"""Options of all plugins and handlers of Accelerate that are options of a strategy here."""

_WINDOW = "engine.no_backward_sync(model, enabled=...) around forward and backward, and step after the last one"
_RANK_ZERO = "if engine.is_global_zero: ..., and engine.barrier() after it"
_THIS_RANK = "if engine.global_rank == ...: (or engine.local_rank)"
_BLOCK_END = "the end of the block of `with Engine(...)`"
_SAVE = "engine.save(path, {'model': model, 'optimizer': optimizer})"
_LOADERS = "engine.setup_dataloaders, which says what each process reads"

ENGINE_MEMBERS = {
    "prepare": "engine.setup(module, optimizer) and engine.setup_dataloaders(loader)",
    "prepare_model": "engine.setup(module)",
    "prepare_data_loader": "engine.setup_dataloaders(loader)",
    **dict.fromkeys(
        ("prepare_optimizer", "prepare_scheduler"), "engine.setup(module, optimizer); step a scheduler yourself"
    ),
    **dict.fromkeys(
        ("accumulate", "no_sync", "sync_gradients", "gradient_accumulation_steps", "trigger_sync_in_backward"), _WINDOW
    ),
    "unscale_gradients": "engine.clip_gradients, which unscales them, or engine.strategy.unscale(optimizer)",
    "clip_grad_norm_": "engine.clip_gradients(model, optimizer, max_norm=...)",
    "clip_grad_value_": "engine.clip_gradients(model, optimizer, clip_val=...)",
    "gather": "engine.gather_uneven, which joins tensors as gather does; engine.all_gather stacks them",
    "gather_for_metrics": "engine.setup_dataloaders(loader, training=False): collect in the loop, and once after it "
    "engine.gather_uneven(torch.cat(outputs) if outputs else None)",
    "pad_across_processes": "engine.gather_uneven, which needs no padding",
    "reduce": "engine.all_reduce",
    **dict.fromkeys(("is_main_process", "is_last_process"), "engine.is_global_zero, or engine.global_rank"),
    **dict.fromkeys(("is_local_main_process", "local_process_index"), "engine.local_rank"),
    "process_index": "engine.global_rank",
    "num_processes": "engine.world_size",
    **dict.fromkeys(("use_distributed", "multi_device"), "engine.world_size > 1"),
    "wait_for_everyone": "engine.barrier()",
    **dict.fromkeys(("main_process_first", "local_main_process_first", "on_main_process"), _RANK_ZERO),
    **dict.fromkeys(("on_local_main_process", "on_last_process", "on_process", "on_local_process"), _THIS_RANK),
    **dict.fromkeys(("context_parallel_rank", "tensor_parallel_rank", "pipeline_parallel_rank"), "engine.global_rank"),
    **dict.fromkeys(
        ("data_parallel_rank", "data_parallel_shard_rank"), "engine.strategy.processes.reader, one of its `readers`"
    ),
    **dict.fromkeys(
        ("parallelism_config", "torch_device_mesh", "is_composable_parallelism_enabled"), "engine.strategy"
    ),
    **dict.fromkeys(("distributed_type", "state", "is_fsdp2", "deepspeed_plugin"), "engine.strategy"),
    "maybe_context_parallel": "strategy=FSDPStrategy(context_parallel=N), which splits the sequences",
    "unwrap_model": "model.module, and engine.full_state_dict(model) for its weights",
    "get_state_dict": "engine.full_state_dict(model)",
    **dict.fromkeys(("save_state", "save_model"), _SAVE),
    **dict.fromkeys(("load_state", "register_for_checkpointing"), "engine.load(path, state), and the object in state"),
    "skip_first_batches": "engine.load: loaders go on at their next batch",
    "split_between_processes": "engine.global_rank and world_size, or a loader of the inputs",
    **dict.fromkeys(("dispatch_batches", "even_batches", "split_batches", "join_uneven_inputs"), _LOADERS),
    **dict.fromkeys(("use_seedable_sampler", "use_stateful_dataloader"), _LOADERS),
    "non_blocking": "DataLoader(pin_memory=True): batches are then copied during the step",
    **dict.fromkeys(("mixed_precision", "fp8_backend"), "engine.strategy.precision"),
    **dict.fromkeys(("scaler", "optimizer_step_was_skipped"), "engine.strategy.scaler"),
    **dict.fromkeys(("init_trackers", "get_tracker", "trackers", "project_dir", "logging_dir"), _OWN_LOGGER),
    "log": _OWN_LOGGER,
    "profile": "torch.profiler.profile around the loop",
    **dict.fromkeys(("end_training", "free_memory", "clear"), _BLOCK_END),
}
"""Members of `Accelerator` -> for an Engine."""

_BIG = "accelerate itself, inside configure_model: see the page 'huggingface'"
_PROCESS = "trainer.is_global_zero, global_rank and world_size, or those of an Engine"

NAMES = {
    "Accelerator": "Trainer, or Engine for a loop of your own: see 'Scripts of Accelerate, before and after'",
    **dict.fromkeys(("PartialState", "AcceleratorState", "GradientState"), _PROCESS),
    "notebook_launcher": "trainer.launch(function, *args, devices=2)",
    "debug_launcher": "trainer.launch(function, *args, devices=2, accelerator='cpu')",
    "set_seed": "seed_everything(seed), or Trainer(seed=...)",
    "synchronize_rng_states": "Trainer(seed=...): all processes derive their generators from one seed",
    "find_executable_batch_size": "Tuner(trainer).scale_batch_size(module), or accumulate_grad_batches='auto'",
    "skip_first_batches": "fit(..., ckpt_path='last'), which continues at the next batch",
    "LocalSGD": "DDPStrategy(comm_hook=...) and a PeriodicModelAverager of torch: see the page 'distributed'",
    "prepare_pippy": "FSDPStrategy(pipeline_parallel=2) with trainer.predict",
    **dict.fromkeys(
        (
            *("init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"),
            *("dispatch_model", "infer_auto_device_map", "cpu_offload", "cpu_offload_with_hook", "disk_offload"),
        ),
        _BIG,
    ),
    "DataLoaderConfiguration": "options of your DataLoader; see the page 'data'",
    "DeepSpeedPlugin": "DeepSpeedStrategy of trainer.strategies",
    "FullyShardedDataParallelPlugin": "FSDPStrategy of trainer.strategies",
    **dict.fromkeys(
        ("MegatronLMPlugin", "ParallelismConfig", "TorchTensorParallelPlugin"), f"{_PARALLEL} {_OF_TRAINER_STRATEGIES}"
    ),
    **dict.fromkeys(("DistributedDataParallelKwargs", "DDPCommunicationHookType"), "DDPStrategy of trainer.strategies"),
    "InitProcessGroupKwargs": "timeout_seconds= of a strategy",
    **dict.fromkeys(
        ("AutocastKwargs", "GradScalerKwargs"), "Trainer(precision=...): scaling begins and grows as in torch"
    ),
    "GradientAccumulationPlugin": "Trainer(accumulate_grad_batches=)",
    "TorchDynamoPlugin": "Trainer(compile=)",
    "ProfileKwargs": f"Trainer({_PROFILER})",
    "ProjectConfiguration": "Trainer(default_root_dir=), and ModelCheckpoint(save_top_k=, save_last=)",
    **dict.fromkeys(("FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"), f"Trainer({_FP8})"),
    "DistributedType": "trainer.strategy.name",
}
"""Names that accelerate and accelerate.utils export -> here."""

_PER_MACHINE = "--nproc-per-node N: processes on this machine, not on all of them"
_ADDRESS = "--rdzv HOST:PORT, the same on all machines"
_STRATEGY = "Trainer(strategy=...), or --trainer.strategy NAME behind `trainer fit`"
_TPU = "Trainer(accelerator='tpu') and no launcher: one process drives all cores"

LAUNCH_OPTIONS = {
    **dict.fromkeys(("--main-process-ip", "--main-process-port"), _ADDRESS),
    "--num-processes": _PER_MACHINE,
    "--num-machines": "--nnodes N: machines",
    "--machine-rank": "--node-rank N, or nothing: the machines are numbered automatically",
    "--multi-gpu": "nothing: one process is started for each GPU; --nproc-per-node N starts N",
    "--gpu-ids": "CUDA_VISIBLE_DEVICES=0,1 before the command, or --trainer.devices '[0, 1]' behind `trainer fit`",
    **dict.fromkeys(("--cpu", "--use-cpu"), "Trainer(accelerator='cpu') in the script, and --nproc-per-node N"),
    **dict.fromkeys(("--num-cpu-threads", "--num-cpu-threads-per-process"), "OMP_NUM_THREADS=N before the command"),
    "--enable-cpu-affinity": "numactl before the command, or srun --cpu-bind",
    "--config-file": "trainer launch ... trainer fit --config FILE; `trainer config --from FILE` translates a file of "
    "Accelerate or DeepSpeed",
    "--mixed-precision": "Trainer(precision='bf16-mixed'), or --trainer.precision bf16-mixed behind `trainer fit`",
    "--downcast-bf16": "Trainer(precision='bf16-true')",
    "--gradient-accumulation-steps": _ACCUMULATION,
    "--gradient-clipping": "Trainer(gradient_clip_val=1.0)",
    **dict.fromkeys(
        ("--use-deepspeed", "--use-fsdp", "--use-megatron-lm", "--use-parallelism-config", "--zero-stage"), _STRATEGY
    ),
    **dict.fromkeys(("--tpu", "--use-xla"), _TPU),
    "--deepspeed-config-file": "DeepSpeedStrategy(config=FILE) as strategy; `trainer config --from FILE` translates it",
    **dict.fromkeys(
        ("--deepspeed-hostfile", "--deepspeed-multinode-launcher"),
        "nothing: start the command on each of the machines, with --nnodes N --rdzv HOST:PORT",
    ),
    **dict.fromkeys(
        ("--deepspeed-inclusion-filter", "--deepspeed-exclusion-filter"), "CUDA_VISIBLE_DEVICES=0,1 before the command"
    ),
    "--mpirun-hostfile": "mpirun -n N --hostfile FILE trainer fit ..., whose variables are read",
    "--debug": "nothing: a collective that not all processes make is always reported",
}
"""Options of `accelerate launch` -> of `trainer launch`."""

_PREFIXES = {
    "--fsdp-": "Trainer(strategy=FSDPStrategy(...))",
    "--megatron-lm-": "Trainer(strategy=FSDPStrategy(...))",
    "--parallelism-config-": "Trainer(strategy=FSDPStrategy(...))",
    "--deepspeed-": "Trainer(strategy=DeepSpeedStrategy(...))",
    "--offload-": "Trainer(strategy=DeepSpeedStrategy(...))",
    "--zero3-": "Trainer(strategy=DeepSpeedStrategy(...))",
    "--dynamo-": "Trainer(compile={'mode': ..., 'fullgraph': ..., 'dynamic': ..., 'blocks': ...})",
    "--fp8-": f"Trainer({_FP8})",
}


def launch_option_words(option: str) -> str | None:
    """Return what to use instead of an option of `accelerate launch`, written with dashes; None: it has none such."""
    if option in LAUNCH_OPTIONS:
        return LAUNCH_OPTIONS[option]
    return next((words for prefix, words in _PREFIXES.items() if option.startswith(prefix)), None)
