"""Lightning's public names and their equivalents here: one table, in strings only.

A name is here under the same name, has another name here (`STRATEGY_ALIASES`, `NAMES`), or is answered by what to use
(`WORDS`, `NAMES`). All are names of Lightning 2. Nothing imports this file before a name is missed: see `names.misses`.
`docs/names_pages.py` writes `docs/lightning-names.md` of it; a test compares it with the installed Lightning.
"""

from __future__ import annotations

from pathlib import Path

from trainer.compat import accelerate


def _of(module: str, names: str) -> dict[str, str]:
    """Return rows of names that a module here has, too; those that Lightning calls private without the underscore."""
    return {name: f"{module}:{name.removeprefix('_')}" for name in names.split()}


def _all(target: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), target)


NAMES: dict[str, str] = {
    # Names that modules and packages export, with the path of the module where another one has the name, too.
    # "module:name" is imported; other texts say what to use.
    **dict.fromkeys(("LightningModule", "TrainModule"), "trainer.module:TrainModule"),
    **dict.fromkeys(("LightningDataModule", "DataModule"), "trainer.data.datamodule:DataModule"),
    "Trainer": "trainer.trainer:Trainer",
    **_of("trainer.callback", "Callback Checkpoint"),
    **_of("trainer.logger", "Logger DummyLogger rank_zero_experiment"),
    **_of("trainer.seed", "seed_everything isolate_rng"),
    "CombinedLoader": "trainer.data.combined_loader:CombinedLoader",
    "AttributeDict": "trainer.hyperparameters:Hyperparameters",
    "HyperparametersMixin": "trainer.hyperparameters:HasHyperparameters",
    **_of("trainer.distributed.rank_zero", "rank_zero_only rank_zero_info rank_zero_warn rank_zero_debug WarningCache"),
    **_of("trainer.distributed.rank_zero", "rank_prefixed_message"),
    "rank_zero_deprecation": "trainer.distributed.rank_zero:rank_zero_warn",
    "_get_rank": "trainer.compat.finder:get_rank",
    "_logger": "trainer.distributed.rank_zero:log",
    **_all("typing:Any", "STEP_OUTPUT TRAIN_DATALOADERS EVAL_DATALOADERS ArgsType OptimizerLRScheduler _OUT_DICT"),
    **_all("typing:Any", "LRSchedulerPLType LRSchedulerTypeUnion _DEVICE _MAP_LOCATION_TYPE _PREDICT_OUTPUT"),
    **_of("trainer.compat.types", "_EVALUATE_OUTPUT OptimizerLRSchedulerConfig OptimizerConfig LRSchedulerConfigType"),
    **_of(
        "trainer.compat.types", "_PATH OptimizerCallable LRSchedulerCallable Optimizable _IS_WINDOWS _IS_INTERACTIVE"
    ),
    "LRSchedulerConfig": "trainer.optimizers:TimedScheduler",
    **_of("torch.optim.lr_scheduler", "LRScheduler ReduceLROnPlateau"),
    "ReduceOp": "torch.distributed:ReduceOp",
    "_distributed_is_initialized": "torch.distributed:is_initialized",
    "default_pg_timeout": "torch.distributed.constants:default_pg_timeout",
    "MisconfigurationException": "trainer.errors:ConfigError",
    "SIGTERMException": "builtins:SystemExit",
    "LightningDeprecationWarning": "builtins:DeprecationWarning",
    **_of("trainer.names.states", "TrainerFn RunningStage TrainerStatus TrainerState GradClipAlgorithmType"),
    "LightningEnum": "trainer.names.states:TextEnum",
    "LightningOptimizer": "trainer.loop.manual:ManualOptimizer",
    "grad_norm": "trainer.model.gradients:grad_norm",
    "move_data_to_device": "trainer.data.transfer:move_data_to_device",
    "is_overridden": "trainer.model.optional_methods:is_overridden",
    "find_shared_parameters": "torch.nn.Module.named_parameters(remove_duplicate=False): equal objects are shared",
    "set_shared_parameters": "assign the one parameter to both layers in __init__ or configure_model",
    "is_shared_filesystem": "nothing: where several machines write, the folder has to be shared",
    **_of("trainer.compat.helpers", "module_available get_init_args instantiate_class is_param_in_hook_signature"),
    **_of("trainer.compat.helpers", "get_filesystem _is_local_file_protocol load _load apply_to_collection"),
    **_of("trainer.compat.helpers", "is_picklable is_oom_error garbage_collection_cuda suggested_max_num_workers"),
    **_of("trainer.compat.helpers", "_add_prefix _convert_params _sanitize_callable_params _scan_checkpoints"),
    **_of("trainer.compat.helpers", "measure_flops PossibleUserWarning disable_possible_user_warnings"),
    "package_available": "trainer.compat.helpers:module_available",
    "pl_load": "trainer.compat.helpers:load",
    **dict.fromkeys(("is_cuda_out_of_memory", "is_out_of_cpu_memory"), "trainer.compat.helpers:is_oom_error"),
    "core.ModelSummary": "trainer.compat.helpers:ModelSummary",
    "utilities.model_summary.ModelSummary": "trainer.compat.helpers:ModelSummary",
    "utilities.model_summary.model_summary.ModelSummary": "trainer.compat.helpers:ModelSummary",
    "summarize": "trainer.callbacks.model_summary:summarize",
    "convert_zero_checkpoint_to_fp32_state_dict": "`trainer checkpoint export`: all strategies write the same format",
    # the inside of the Trainer
    **_of("trainer.compat.inside", "_FitLoop _EvaluationLoop _AcceleratorConnector"),
    "_TrainingEpochLoop": "trainer.compat.inside:EpochLoop",
    "_PredictionLoop": "trainer.compat.inside:EvaluationLoop",
    # accelerators, plugins, profilers, strategies
    "Accelerator": "Trainer(accelerator='cpu' | 'cuda' | 'tpu'); or, for that of Accelerate, a Trainer or an Engine",
    "accelerators.Accelerator": "trainer.compat.accelerators:Accelerator",
    "accelerators.accelerator.Accelerator": "trainer.compat.accelerators:Accelerator",
    **_of("trainer.compat.accelerators", "CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator"),
    "TPUAccelerator": "trainer.compat.accelerators:XLAAccelerator",
    **dict.fromkeys(("AcceleratorRegistry", "ACCELERATOR_REGISTRY"), "trainer.compat.helpers:ACCELERATORS"),
    "is_cuda_available": "torch.cuda:is_available",
    "num_cuda_devices": "torch.cuda:device_count",
    "find_usable_cuda_devices": "Trainer(devices=N), which takes the first N; choose others with CUDA_VISIBLE_DEVICES",
    **_of("trainer.compat.plugins", "CheckpointIO AsyncCheckpointIO TorchCheckpointIO"),
    **dict.fromkeys(("Precision", "PrecisionPlugin"), "trainer.precision:Precision"),
    **_of("trainer.compat.plugins", "MixedPrecision DoublePrecision HalfPrecision FSDPPrecision DeepSpeedPrecision"),
    "MixedPrecisionPlugin": "trainer.compat.plugins:MixedPrecision",
    "DoublePrecisionPlugin": "trainer.compat.plugins:DoublePrecision",
    "XLAPrecision": "Trainer(precision='bf16-true') with strategy='xla'",
    "BitsandbytesPrecision": "layers of bitsandbytes, made in configure_model",
    "TransformerEnginePrecision": "Trainer(precision='fp8')",
    **_of("trainer.compat.plugins", "ClusterEnvironment LightningEnvironment SLURMEnvironment TorchElasticEnvironment"),
    "KubeflowEnvironment": "trainer.compat.plugins:TorchElasticEnvironment",
    "MPIEnvironment": "trainer launch, torchrun or srun: processes started by mpirun are not known",
    "LSFEnvironment": "trainer launch or torchrun on each machine of the LSF job",
    "XLAEnvironment": "Trainer(strategy='xla')",
    "TorchSyncBatchNorm": "trainer.compat.plugins:TorchSyncBatchNorm",
    **_of("trainer.strategies", "DDPStrategy FSDPStrategy DeepSpeedStrategy SingleDeviceStrategy"),
    **dict.fromkeys(("StrategyRegistry", "STRATEGY_REGISTRY"), "trainer.compat.helpers:STRATEGIES"),
    **dict.fromkeys(("Strategy", "ParallelStrategy"), "trainer.strategy:Strategy"),
    "ModelParallelStrategy": "trainer.strategies:FSDPStrategy",
    **dict.fromkeys(("XLAStrategy", "SingleDeviceXLAStrategy"), "trainer.strategies:XlaStrategy"),
    "XLAFSDPStrategy": "trainer.strategies:XlaFsdpStrategy",
    "DataParallelStrategy": "strategy='ddp'",
    **_of("trainer.callbacks", "Profiler SimpleProfiler AdvancedProfiler PassThroughProfiler RichModelSummary"),
    "PyTorchProfiler": "trainer.callbacks:TorchProfiler",
    "XLAProfiler": "torch_xla.debug.profiler around fit",
    "Tuner": "trainer.tuner:Tuner",
    # callbacks and loggers that are not here
    "ModelPruning": "torch.nn.utils.prune in on_train_epoch_end of a callback of your own",
    "SpikeDetection": "trainer.callbacks.BadStepGuard, or EarlyStopping(divergence_threshold=...)",
    "BatchSizeFinder": "Tuner(trainer).scale_batch_size(module) of trainer.tuner, or `trainer tune batch-size`",
    "LearningRateFinder": "Tuner(trainer).lr_find(module) of trainer.tuner, or `trainer tune lr`",
    **_all("a Tracker of your own: twenty lines, see the page 'loggers'", "CometLogger LitLogger NeptuneLogger"),
    "ExperimentWriter": "trainer.callbacks:CSVLogger",
    # the rest
    **_of("trainer.cli.lightning_cli", "LightningCLI LightningArgumentParser"),
    "SaveConfigCallback": "nothing: a run has config.yaml in its run directory",
    "Fabric": "trainer.Engine, with the same names: see the page 'engine'",
    "__version__": "trainer:__version__",
    **_of("trainer.compat.demos", "BoringModel BoringDataModule DemoModel RandomDataset cli_lightning_logo"),
    "MNIST": "trainer.compat.demos:mnist",
    "get_torchvision_model": "trainer.compat.demos:get_torchvision_model",
    **_all("trainer.TrainModule or trainer.DataModule, which have these hooks", "ModelHooks DataHooks CheckpointHooks"),
}

PACKAGES_IN_WORDS = {
    "data": "litdata, which this package has become",
    "strategies.launchers": "`trainer launch`, torchrun or srun: the processes are started by the run",
    "plugins": "Trainer(strategy=..., precision=...)",
    "accelerators": "Trainer(accelerator='cpu' | 'cuda' | 'mps' | 'tpu')",
    "trainer.connectors": "the public attributes of the Trainer, such as callback_metrics, callbacks, train_dataloader",
    "utilities.apply_func": "torch.utils._pytree.tree_map",
    "utilities.cloud_io": "torch.load and torch.save, or fsspec",
    "utilities.distributed": "torch.distributed, or trainer.strategy.processes",
    "utilities.exceptions": "trainer.ConfigError",
    "utilities.types": "typing.Any",
    "callbacks.progress": "RichProgressBarTheme for the looks of the bar, or a subclass of ProgressBar",
    "core.saving": "save_hyperparameters and load_from_checkpoint(hparams_file=), or yaml.safe_load",
    "demos": "a module or dataset of your own, such as those of `trainer init`",
    "loops": "trainer.progress and the hooks: a loop is not an object here",
    "utilities.model_summary": "trainer.callbacks.model_summary.summarize(module), which returns the table as text",
}
"""Lightning's packages -> what to use instead of a name of theirs that is not in `NAMES`."""

_BARS = {
    **dict.fromkeys(
        (
            *("init_sanity_tqdm", "init_train_tqdm", "init_validation_tqdm", "init_test_tqdm", "init_predict_tqdm"),
            *("train_progress_bar", "val_progress_bar", "test_progress_bar", "predict_progress_bar"),
        ),
        "self.log(..., prog_bar=True) for values, and refresh_rate= and leave= for the bar",
    ),
    **dict.fromkeys(
        (
            "total_val_batches_current_dataloader",
            "total_test_batches_current_dataloader",
            "total_predict_batches_current_dataloader",
        ),
        "trainer.num_val_batches[dataloader_idx], and num_test_batches and num_predict_batches",
    ),
    "enable": "refresh_rate=0 to show nothing",
}

_ENGINE = {
    "launch": "with Engine(...) as engine: the processes are started there",
    "run": "with Engine(...) as engine: the loop stands in this block",
    **dict.fromkeys(("setup_module", "setup_optimizers"), "engine.setup(module, optimizer)"),
    **dict.fromkeys(("sharded_model", "empty_init", "init_tensor"), "engine.init_module()"),
    "load_raw": "engine.load(path, {'model': model})",
    "rank_zero_first": "if engine.is_global_zero: ..., and engine.barrier() after it",
    "seed_everything": "Engine(seed=...)",
    "node_rank": "engine.global_rank and local_rank",
    "accelerator": "engine.device",
    "call": "a call in the loop; callbacks belong to a Trainer",
    **dict.fromkeys(
        ("log", "log_dict", "logger", "loggers"),
        "a logger of your own, if engine.is_global_zero; loggers belong to a Trainer",
    ),
    **accelerate.ENGINE_MEMBERS,
}

_MODULE_AND_DATA = {
    "remove_ignored_hparams": "save_hyperparameters(ignore=[...])",
    "allow_zero_length_dataloader_with_multiple_devices": "nothing: an error in training, allowed in evaluations",
}

WORDS: dict[str, dict[str, str]] = {
    "LightningModule": {
        **_MODULE_AND_DATA,
        "configure_sharded_model": "configure_model",
        "fabric": "self.trainer; the Engine is for a loop of your own",
        "to_torchscript": "to_onnx, torch.export.export(module, args), or torch.jit.script(module)",
        "to_tensorrt": "to_onnx, and TensorRT's own tools on the file",
    },
    "LightningDataModule": {
        **_MODULE_AND_DATA,
        "name": "type(self).__name__, or an attribute of your own",
        "size": "an attribute of your own",
    },
    "Trainer": {
        "distributed_sampler_kwargs": "trainer.readers and trainer.reader, for num_replicas and rank",
        "init_module": "the module's configure_model, which builds layers on the strategy's device",
        "precision_plugin": "trainer.precision",
        "val_check_batch": "trainer.val_check_interval",
        "_data_connector": "trainer.train_loader, val_loaders",
        "_callback_connector": "trainer.callbacks",
        "_results": "trainer.callback_metrics",
        "devices": "trainer.num_devices",
        "_signal_connector": "trainer.interrupted, received_sigterm",
        "enable_progress_bar": "trainer.progress_bar_callback, which is None without one",
    },
    "Logger": {"after_save_checkpoint": "on_checkpoint_saved"},
    "ModelCheckpoint": {
        **dict.fromkeys(
            ("CHECKPOINT_EQUALS_CHAR", "CHECKPOINT_JOIN_CHAR"), "auto_insert_metric_name=False and a filename of yours"
        ),
        "CHECKPOINT_NAME_LAST": "last_model_path: 'last' is a pointer to the newest checkpoint",
        "FILE_EXTENSION": "last_model_path: a checkpoint is a folder",
        "format_checkpoint_name": "best_model_path or last_model_path",
        "(enable_version_counter)": "nothing: a checkpoint of the same name replaces it, or gets -v1",
    },
    "ProgressBar": _BARS,
    "TQDMProgressBar": _BARS,
    "RichProgressBar": _BARS | {"configure_columns": "a subclass of ProgressBar"},
    "StochasticWeightAveraging": dict.fromkeys(
        (
            *("pl_module_contains_batch_norm", "reset_batch_norm_and_save_state", "reset_momenta", "swa_end"),
            *("swa_start", "transfer_weights", "update_parameters"),
        ),
        "nothing: a subclass of WeightAveraging decides by should_update",
    ),
    "WandbLogger": {
        "download_artifact": "self.logger.experiment.use_artifact(name).download()",
        **dict.fromkeys(
            ("log_audio", "log_video"), "self.logger.experiment.log({key: wandb.Video(...)}), or wandb.Audio"
        ),
    },
    "PyTorchProfiler": {
        "function_events": "the table next to the trace in `profile/` of the run directory",
        "(emit_nvtx)": "nsys with --capture-range, and torch.autograd.profiler.emit_nvtx around fit",
        "(record_module_names)": "with_stack=True",
        "(export_to_chrome)": "nothing: traces are always written",
        "(group_by_input_shapes)": "record_shapes=True",
        "(table_kwargs)": "on_trace_ready=, a function that prints its argument's key_averages().table(...)",
    },
    "Engine": _ENGINE,
    "TensorBoardLogger": dict.fromkeys(("(flush_secs)", "(max_queue)"), "flush_seconds="),
    "ParallelStrategy": {
        "accelerator": "strategy.device",
        "all_gather": "TrainModule.all_gather, or strategy.processes.all_gather_object for data",
        "batch_to_device": "strategy.to_device",
        "block_backward_sync": "strategy.gradient_sync",
        "distributed_sampler_kwargs": "nothing: a plain DataLoader is made to read its process's share",
        **dict.fromkeys(("training_step", "validation_step", "test_step", "predict_step"), "strategy.call_step"),
        **dict.fromkeys(("pre_backward", "post_backward"), "an override of strategy.backward"),
        "lightning_module_state_dict": "strategy.module_state",
        "load_model_state_dict": "strategy.load_module_state",
        "load_optimizer_state_dict": "strategy.load_optimizer_state",
        "model_sharded_context": "strategy.init_context",
        "model_to_device": "strategy.setup_module",
        "optimizer_step": "strategy.step",
        "parallel_devices": "strategy.device, that of this process",
        "process_dataloader": "on_after_batch_transfer, or the DataLoader itself",
        "setup": "an override of strategy.setup_module or strategy.setup_optimizers",
        "tensor_init_context": "strategy.init_context",
        "cluster_environment": "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each process",
        "device_mesh": "self.device_mesh of the module",
        "no_backward_sync": "strategy.gradient_sync",
        "(accelerator)": "Trainer(accelerator=)",
        "(checkpoint_io)": "ModelCheckpoint(dirpath=), for storage of another kind too",
        "(cluster_environment)": "nothing: the environment is found by its variables",
        "(parallel_devices)": "Trainer(devices=)",
        "(precision_plugin)": "Trainer(precision=)",
        **dict.fromkeys(
            (
                *("on_exception", "on_train_start", "on_train_end", "on_train_batch_start", "on_validation_start"),
                *("on_validation_end", "on_test_start", "on_test_end", "on_predict_start", "on_predict_end"),
            ),
            "the hook of a Callback: strategies have none",
        ),
    },
}
"""Lightning's class -> a name that is not here -> what to use instead."""

KEEP_OUTPUTS = "append what is needed to a list of the module in the step, read it there, and clear it"
_PER_PROCESS = "each process has its own batch and loss"

FORMER_HOOKS = {
    "training_epoch_end": f"on_train_epoch_end(self), which gets no outputs: {KEEP_OUTPUTS}",
    "validation_epoch_end": f"on_validation_epoch_end(self), which gets no outputs: {KEEP_OUTPUTS}",
    "test_epoch_end": f"on_test_epoch_end(self), which gets no outputs: {KEEP_OUTPUTS}",
    "predict_epoch_end": f"on_predict_epoch_end(self), which gets no outputs: {KEEP_OUTPUTS}",
    "validation_end": f"on_validation_epoch_end(self), which gets no outputs: {KEEP_OUTPUTS}",
    "test_end": f"on_test_epoch_end(self), which gets no outputs: {KEEP_OUTPUTS}",
    "training_step_end": f"the end of training_step: {_PER_PROCESS}",
    "validation_step_end": f"the end of validation_step: {_PER_PROCESS}",
    "test_step_end": f"the end of test_step: {_PER_PROCESS}",
    "training_end": f"the end of training_step: {_PER_PROCESS}",
    "on_epoch_start": "on_train_epoch_start, and on_validation_epoch_start where it was meant for validation too",
    "on_epoch_end": "on_train_epoch_end, and on_validation_epoch_end where it was meant for validation too",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception, which gets the KeyboardInterrupt",
    "configure_sharded_model": "configure_model",
    "tbptt_split_batch": "automatic_optimization = False, and a loop over the parts in training_step",
    "get_progress_bar_dict": "self.log(..., prog_bar=True)",
}
"""Methods of earlier versions' modules and callbacks, which are no longer called -> what to use instead."""

VIEWED = {
    **dict.fromkeys(("fit_loop", "validate_loop", "test_loop", "predict_loop", "accelerator", "barebones"), "Trainer"),
    **dict.fromkeys(("_accelerator_connector", "_checkpoint_connector", "_logger_connector"), "Trainer"),
    "checkpoint_io": "ParallelStrategy",
    **dict.fromkeys(("trainer", "print", "is_enabled", "is_disabled"), "ProgressBar"),
    **dict.fromkeys(("total_train_batches", "total_val_batches"), "ProgressBar"),
}
"""Attribute of which `trainer.compat.inside` has a view -> Lightning's class."""

BESIDE_VIEWS = (
    "the Trainer's arguments and attributes, such as max_epochs, num_training_batches, current_epoch and global_step"
)
"""Words for the rest of a view."""

STRATEGY_ALIASES = {  # not in the class: strategies may have attributes of these names themselves
    "root_device": "device",
    "lightning_module": "module",
    "model": "module",
    "precision_plugin": "precision",
    "strategy_name": "name",
    "global_rank": "processes.rank",
    "local_rank": "processes.local_rank",
    "world_size": "processes.world_size",
    "num_nodes": "processes.num_nodes",
    "num_processes": "processes.world_size",
    "is_global_zero": "processes.is_global_zero",
    "load_checkpoint": "checkpoint_io.load_checkpoint",
    "save_checkpoint": "checkpoint_io.save_checkpoint",
    "remove_checkpoint": "checkpoint_io.remove_checkpoint",
}
"""Members of Lightning's strategies that have another name here -> the path of the attribute here."""

COLLECTIVES = {
    "barrier": "strategy.processes.barrier",
    "broadcast": "strategy.processes.broadcast_object",
    "reduce": "strategy.processes.sum",
    "reduce_boolean_decision": "strategy.processes.all_gather_object",
}
"""Methods of Lightning's strategies that `trainer.compat.collectives` has -> what the trainer calls."""

HOMES: dict[str, str] = {
    "LightningModule": "trainer.module:TrainModule",
    "LightningDataModule": "trainer.data.datamodule:DataModule",
    "Trainer": "trainer.trainer:Trainer",
    "Callback": "trainer.callback:Callback",
    "Checkpoint": "trainer.callback:Checkpoint",
    "Logger": "trainer.logger:Logger",
    "PyTorchProfiler": "trainer.callbacks:TorchProfiler",
    "ParallelStrategy": "trainer.strategy:Strategy",
}
"""Lightning's class -> ours; others have their name in `trainer.callbacks`."""

THEIRS = {home.partition(":")[2]: name for name, home in HOMES.items()}
"""Our class -> Lightning's name for it, where that is another one."""

_ROWS = [row.split() for row in Path(__file__).with_name("modules.txt").read_text(encoding="utf-8").splitlines()]
MODULES: dict[str, list[str]] = {module: names for module, *names in _ROWS}
"""Lightning's modules, without the name of its package -> the names that each defines or exports.

Modules of the same name here are found first. Below `fabric` are those of Fabric.
"""

TRAINER_ARGUMENTS = {
    **accelerate.TRAINER_ARGUMENTS,
    "barebones": "logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, "
    "num_sanity_val_steps=0",
    "max_grad_norm": "gradient_clip_val=",
    "config": "trainer fit --config FILE",
    "enable_autolog_hparams": "a logger whose log_hyperparameters does nothing",
    "model_registry": "trainer checkpoint export, and the registry's own client",
}
"""Arguments of other trainers' Trainer -> what to use instead."""

OTHER_PRECISIONS = {
    **dict.fromkeys(("no", "fp32", "float32", "float", "full"), "'32-true'"),
    **dict.fromkeys(("fp64", "float64", "double"), "'64-true'"),
    **dict.fromkeys(("float16", "half"), "'16-mixed', or '16-true' for weights in float16, too"),
    "bfloat16": "'bf16-mixed', or 'bf16-true' for weights in bfloat16, too",
    **dict.fromkeys(
        ("transformer-engine", "transformer-engine-float16", "te", "float8"), "'fp8', 'fp8-rowwise' or 'mxfp8'"
    ),
}
"""Names of other trainers' and torch's precisions -> the equivalents here."""

OTHER_STRATEGIES = {
    "dp": "'ddp'",
    "model_parallel": "'fsdp'",
    "multi_gpu": "'ddp'",
    "fsdp2": "'fsdp'",
    **{f"zero{stage}": f"'deepspeed_stage_{stage}'" for stage in (1, 2, 3)},
    "deepspeed_stage_1_offload": "DeepSpeedStrategy(stage=1, offload_optimizer='cpu') from trainer.strategies",
    **dict.fromkeys(("tpu", "single_tpu", "single_xla"), "'xla' or 'xla_fsdp', with accelerator='tpu'"),
}
"""Names of other trainers' strategies -> the equivalent here."""

SAME_STRATEGIES: dict[str, tuple[str, dict[str, bool]]] = {
    r"ddp(_spawn|_fork|_notebook)(_find_unused_parameters_false)?|ddp_find_unused_parameters_false": ("ddp", {}),
    r"ddp(_spawn|_fork|_notebook)?_find_unused_parameters_true": ("ddp", {"find_unused_parameters": True}),
    "fsdp_cpu_offload": ("fsdp", {"cpu_offload": True}),
}
"""Pattern of Lightning's names of strategies -> the name here, and its options."""

ENGINE_ARGUMENTS = {
    **accelerate.ENGINE_ARGUMENTS,
    "callbacks": "call what you need in the loop; callbacks belong to a Trainer",
    "loggers": "log in the loop, `if engine.is_global_zero`; loggers belong to a Trainer",
    "logger": "log in the loop, `if engine.is_global_zero`; loggers belong to a Trainer",
    "gradient_clip_val": "engine.clip_gradients(model, optimizer, max_norm=...) before optimizer.step()",
    "accumulate_grad_batches": "engine.no_backward_sync(model, enabled=...) around forward and backward",
    "plugins": "precision= and strategy=",
    **dict.fromkeys(
        ("max_restarts", "watchdog_seconds"),
        "a Trainer, or `trainer launch --max-restarts`: the Engine restarts nothing",
    ),
    "max_epochs": "the loop is yours: for epoch in range(loader.epoch, ...)",
}
"""Arguments of other trainers, and of Trainer -> what to use instead in an Engine."""

STRATEGY_OPTIONS = {
    **accelerate.STRATEGY_OPTIONS,
    "device": "Trainer(accelerator=..., devices=[0])",
    "mixed_precision": "Trainer(precision=...)",
    "activation_checkpointing_policy": "Trainer(activation_checkpointing=...)",
    "process_group_backend": "nothing: gloo on CPUs, and NCCL too on GPUs",
    "ddp_comm_hook": "comm_hook=",
    "ddp_comm_state": "comm_hook_state=",
    "offload_params_device": "offload_parameters=",
    "data_parallel_size": "nothing: the processes that the other sizes leave read different samples",
    "tensor_parallel_size": "tensor_parallel=",
    "exclude_frozen_parameters": "ModelCheckpoint(trainable_only=True)",
    "ddp_comm_wrapper": "comm_hook=, with a function that calls the other",
    "zero_optimization": "stage=",
    **dict.fromkeys(
        (
            *("params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "block_size"),
            *("queue_depth", "single_submit", "overlap_events", "thread_count", "pin_memory", "sub_group_size"),
            *("contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter"),
            *("allgather_bucket_size", "reduce_bucket_size", "zero_allow_untested_optimizer", "logging_level"),
            *("logging_batch_size_per_gpu", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
            *("min_loss_scale", "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
            "synchronize_checkpoint_boundary",
        ),
        "config={...}, where DeepSpeed's own configuration has it",
    ),
}
"""Options of other trainers' strategies -> what to use instead."""

DEFAULTS: dict[str, dict[str, tuple[object, ...]]] = {
    "Trainer": {"barebones": (False,), "model_registry": (None,), "enable_autolog_hparams": (True,)},
    "ModelCheckpoint": {"enable_version_counter": (True,)},
    "PyTorchProfiler": {
        **dict.fromkeys(("emit_nvtx", "group_by_input_shapes"), (False,)),
        **dict.fromkeys(("export_to_chrome", "record_module_names"), (True,)),
        "table_kwargs": (None,),
    },
}
"""Lightning's class -> an argument that is not here -> values with which it may be given, because they change nothing.
"""
