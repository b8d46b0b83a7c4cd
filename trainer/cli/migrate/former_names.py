"""Names of Lightning 1 that Lightning 2 has removed, and what to use instead: strings only.

A run does not know them: they are read by `trainer migrate` alone.
"""

from __future__ import annotations

NAMES = {
    "GPUAccelerator": "Trainer(accelerator='cuda')",
    **dict.fromkeys(("DDPPlugin", "DDPSpawnStrategy"), "trainer.strategies.DDPStrategy"),
    "DeepSpeedPlugin": "trainer.strategies.DeepSpeedStrategy",
    **dict.fromkeys(
        (
            *("HorovodStrategy", "HivemindStrategy", "CollaborativeStrategy", "DDP2Strategy"),
            *("DataParallelPlugin", "DDP2Plugin", "DDPSpawnPlugin"),
        ),
        "strategy='ddp'",
    ),
    **dict.fromkeys(("DDPFullyShardedStrategy", "DDPFullyShardedNativeStrategy"), "trainer.strategies.FSDPStrategy"),
    **dict.fromkeys(
        ("DDPShardedStrategy", "DDPSpawnShardedStrategy", "DDPShardedPlugin", "ShardedPlugin"),
        "strategy='deepspeed_stage_2' or 'fsdp', which shard the state",
    ),
    "TPUSpawnStrategy": "trainer.strategies.XlaStrategy",
    **dict.fromkeys(
        ("ApexMixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "NativeMixedPrecision"),
        "Trainer(precision='16-mixed')",
    ),
    **dict.fromkeys(("GPUStatsMonitor", "XLAStatsMonitor"), "trainer.callbacks.DeviceStatsMonitor"),
    "LightningLoggerBase": "trainer.logger.Logger",
    "LightningLite": "trainer.Trainer: a loop of your own becomes training_step",
}
"""Names that modules exported."""

MODULES = (
    "callbacks.base callbacks.gpu_stats_monitor callbacks.progress.base callbacks.quantization "
    "callbacks.xla_stats_monitor core.lightning core.memory lite loggers.base overrides.data_parallel "
    "overrides.fairscale plugins.ddp_plugin plugins.environments.cluster_environment "
    "plugins.environments.lightning_environment plugins.environments.slurm_environment "
    "plugins.environments.torchelastic_environment plugins.precision.apex_amp plugins.precision.native_amp "
    "plugins.sharded_plugin plugins.training_type plugins.training_type.ddp plugins.training_type.ddp_spawn "
    "plugins.training_type.deepspeed plugins.training_type.parallel plugins.training_type.training_type_plugin "
    "profiler strategies.ddp_spawn strategies.dp strategies.fully_sharded strategies.fully_sharded_native "
    "strategies.sharded strategies.sharded_spawn trainer.supporters utilities.apply_func utilities.auto_restart "
    "utilities.cli utilities.cloud_io utilities.debugging utilities.device_parser utilities.distributed "
    "utilities.fetching utilities.finite_checks utilities.metrics utilities.optimizer utilities.xla_device"
)
"""Modules, without the name of the package."""

MEMBERS: dict[str, dict[str, str]] = {
    "LightningModule": {
        "datamodule": "self.trainer.datamodule",
        "use_amp": "self.trainer.precision.name",
        "use_ddp": "self.trainer.world_size > 1",
        "amp_level": "Trainer(precision=...)",
        "test_dataloaders": "self.trainer.test_dataloaders",
        "truncated_bptt_steps": "automatic_optimization = False, and a loop over the parts in training_step",
        "optimizer_idx": "automatic_optimization = False, and self.optimizers() in training_step",
        **{
            f"{one}_dataloader": f"self.trainer.datamodule.{one}_dataloader, if the module itself does not define it"
            for one in ("train", "val", "test", "predict")
        },
    },
    "LightningDataModule": dict.fromkeys(
        ("add_argparse_args", "from_argparse_args"), "`trainer fit --config FILE --data.NAME VALUE`"
    ),
    "Trainer": {
        **dict.fromkeys(("num_gpus", "gpus", "tpu_cores", "ipus", "num_cpus"), "trainer.num_devices"),
        "lr_schedulers": "trainer.lr_scheduler_configs",
        **dict.fromkeys(
            ("reset_train_dataloader", "reset_val_dataloader", "reset_train_val_dataloaders"),
            "Trainer(reload_dataloaders_every_n_epochs=1)",
        ),
        "weights_save_path": "ModelCheckpoint(dirpath=...)",
        "tune": "`trainer tune`, or trainer.tuner.Tuner",
        **dict.fromkeys(("lr_find", "auto_lr_find"), "trainer.tuner.Tuner(trainer).lr_find(module)"),
        **dict.fromkeys(
            ("auto_scale_batch_size", "scale_batch_size"), "trainer.tuner.Tuner(trainer).scale_batch_size(module)"
        ),
        **dict.fromkeys(("use_amp", "amp_backend", "amp_level"), "trainer.precision.name"),
        "add_argparse_args": "parser.add_argument for the arguments that are used, or `trainer fit --config FILE`",
        "from_argparse_args": (
            "Trainer(**{name: value for name, value in vars(args).items() if value is not None and name in "
            "inspect.signature(Trainer.__init__).parameters})"
        ),
        **dict.fromkeys(
            (
                *("resume_from_checkpoint", "resume_checkpoint_path", "tested_ckpt_path"),
                *("validated_ckpt_path", "predicted_ckpt_path"),
            ),
            "trainer.ckpt_path",
        ),
        "progress_bar_dict": "trainer.progress_bar_metrics",
    },
}
"""Class -> attributes, beside hooks."""

HOOKS = {
    "on_post_move_to_device": "__init__ or configure_model, in which to tie weights: the strategies keep them tied",
    "training_end": "the end of training_step: each process has its own batch and loss",
    **dict.fromkeys(("on_init_start", "on_init_end", "on_configure_sharded_model"), "setup"),
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    **{f"on_{one}_dataloader": f"{one}_dataloader" for one in ("train", "val", "test", "predict")},
    **dict.fromkeys(("configure_apex", "amp_scale_loss"), "Trainer(precision='16-mixed')"),
    **dict.fromkeys(("configure_ddp", "init_ddp_connection"), "a subclass of trainer.strategies.DDPStrategy"),
    "get_tqdm_dict": "self.log(..., prog_bar=True)",
}
"""Methods of modules, beside those that a run refuses."""

ARGUMENTS: dict[str, dict[str, str]] = {
    "LightningDataModule": {
        one: f"super().__init__() without it, and self.{one} = {one} in your constructor: Lightning 1 only kept it"
        for one in ("train_transforms", "val_transforms", "test_transforms", "dims")
    },
    "Trainer": {
        "gpus": "accelerator='cuda', devices=",
        "resume_from_checkpoint": "fit(..., ckpt_path=...)",
        "weights_save_path": "ModelCheckpoint(dirpath=...)",
        "checkpoint_callback": "enable_checkpointing=, callbacks=[ModelCheckpoint(...)]",
        "distributed_backend": "strategy=",
        **dict.fromkeys(("tpu_cores", "ipus", "num_tpu_cores"), "accelerator=, devices="),
        "num_processes": "devices=",
        **dict.fromkeys(("amp_backend", "amp_level"), "precision="),
        "progress_bar_refresh_rate": "callbacks=[ProgressBar(refresh_rate=...)]",
        "terminate_on_nan": "detect_anomaly=True, or EarlyStopping(..., check_finite=True)",
        "weights_summary": "enable_model_summary=, or callbacks=[ModelSummary(max_depth=...)]",
        "auto_lr_find": "Tuner(trainer).lr_find(module) of trainer.tuner",
        "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(module) of trainer.tuner",
        "auto_select_gpus": "devices=N, which takes the first N; choose others with CUDA_VISIBLE_DEVICES",
        "flush_logs_every_n_steps": "CSVLogger(flush_seconds=...)",
        "prepare_data_per_node": "prepare_data_per_node = False in the data module",
        "track_grad_norm": "callbacks=[GradNormMonitor()]",
        "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
        "move_metrics_to_cpu": "nothing: logged values are read at each flush, and stay on the device before",
        "multiple_trainloader_mode": "CombinedLoader(loaders, mode=...) of trainer.utilities",
        "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(...)]",
        "process_position": "nothing: the bar draws below what is printed",
        "truncated_bptt_steps": "automatic_optimization = False, and a loop over the parts in training_step",
    },
    "Logger": {
        **dict.fromkeys(
            ("agg_key_funcs", "agg_default_func"), "self.log(reduce_fx=), and super().__init__() without it"
        )
    },
    "ModelCheckpoint": {
        "filepath": "dirpath= and filename=",
        "prefix": "filename='my-{epoch}'",
        "save_function": "nothing: trainer.save_checkpoint is called",
    },
    **{one: {"mode": "max_depth=1, or -1 for all levels"} for one in ("ModelSummary", "RichModelSummary")},
    "BackboneFinetuning": {"round": "rounding="},
    "ProgressBar": {"process_position": "nothing: the bar draws below what is printed"},
    **{one: {"output_filename": "dirpath= and filename="} for one in ("AdvancedProfiler", "SimpleProfiler")},
    "PyTorchProfiler": {
        **dict.fromkeys(("output_filename", "path_to_export_trace"), "dirpath="),
        **dict.fromkeys(("profiled_functions", "record_functions"), "wait=, warmup= and active=, in steps"),
        "local_rank": "nothing: it is known",
    },
}
"""Class -> arguments of its constructor."""
