"""The tiers of the tests: the slow tests, the long ones, samples of their matrices, and how many inputs are drawn.

CONTRIBUTING.md says what each tier is for, and the Makefile with which options it is started.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

SLOW = (
    "attack/*",
    "callbacks/test_bad_step_guard.py",
    "callbacks/test_bound_profiler.py",
    "callbacks/test_checkpoint_combinations.py",
    "callbacks/test_checkpoint_folders.py",
    "callbacks/test_checkpoint_writes.py",
    "callbacks/test_grad_norm_monitor.py",
    "callbacks/test_mlflow_logger.py",
    "callbacks/test_straggler_monitor.py",
    "callbacks/test_tensorboard.py",
    "callbacks/test_two_processes.py",
    "callbacks/test_wandb_logger.py",
    "checkpoint/test_optimizer_numbers.py::test_an_optimizers_own_dtypes_survive_under_every_strategy",
    "checkpoint/test_lightning_file.py",
    "checkpoint/test_pretrained.py",
    "cli/test_cli.py",
    "cli/test_config_translation.py::test_deepspeed_itself_takes_what_was_translated",
    "cli/test_doctor_command.py",
    "cli/test_export_hugging_face.py",
    "cli/test_init_command.py",
    "cli/test_launch_command.py",
    "config/test_added_names.py",
    "data/test_lengths.py",
    "data/test_sampler_state.py",
    "data/test_worker_lifetime.py",
    "distributed/test_loopback.py",
    "distributed/test_others_variables.py",
    "distributed/test_rendezvous.py",
    "distributed/test_rendezvous_disagreements.py",
    "distributed/test_slurm.py",
    "emulated/*",
    "examples/*",
    "fault_tolerance/test_children.py",
    "fault_tolerance/test_collective_check.py",
    "fault_tolerance/test_failure.py",
    "fault_tolerance/test_late_signals.py",
    "fault_tolerance/test_process_monitor.py",
    "fault_tolerance/test_stop.py",
    "fault_tolerance/test_user_collectives.py",
    "fault_tolerance/test_watchdog.py",
    "faults/*",
    "launchers/*",
    "lightning/*",
    "loop/test_agreement.py",
    "loop/test_auto_accumulation.py",
    "loop/test_changes.py",
    "loop/test_epoch_end.py",
    "loop/test_evaluation.py",
    "loop/test_finished_runs.py",
    "loop/test_hostile_run_directory.py",
    "loop/test_logged_values.py",
    "loop/test_messages.py",
    "loop/test_mistakes.py::test_folders_of_the_user_called_callbacks_and_strategies",
    "loop/test_mistakes.py::test_parameters_without_gradient_on_two_processes",
    "loop/test_nonfinite.py",
    "loop/test_own_generators.py",
    "loop/test_programs.py",
    "loop/test_resume.py",
    "loop/test_step_meaning.py",
    "model/test_compile.py",
    "model/test_compile_slow.py",
    "model/test_dispatched.py",
    "model/test_memory_runs.py",
    "model/test_optional_methods.py",
    "strategies/test_broken_window.py",
    "strategies/test_call_order.py",
    "strategies/test_changing_buffers.py",
    "strategies/test_changing_parameters.py",
    "strategies/test_counts_of_torch.py",
    "strategies/test_deepspeed_engine.py",
    "strategies/test_deepspeed_state.py",
    "strategies/test_expert_parallel.py",
    "strategies/test_fsdp.py",
    "strategies/test_fsdp_gradients.py",
    "strategies/test_frozen_dtypes.py",
    "strategies/test_full_numbers.py",
    "strategies/test_full_parameters.py",
    "strategies/test_hugging_face_models.py",
    "strategies/test_later_buffers.py",
    "strategies/test_meta_parameters.py",
    "strategies/test_model_parallel.py",
    "strategies/test_parallel_cost.py",
    "strategies/test_portability.py",
    "strategies/test_recomputed_blocks.py",
    "strategies/test_resume_sharded.py",
    "strategies/test_file_of_shards.py",
    "strategies/test_second_run.py",
    "strategies/test_quantized_bases.py",
    "strategies/test_self_sharding.py",
    "strategies/test_side_outputs.py",
    "strategies/test_steps_by_hand.py",
    "strategies/test_strategy_*",
    "strategies/test_weight_penalty.py",
    "tuner/*",
    "test_benchmarks.py",
    "test_contract.py",
    "test_contract_callbacks.py",
    "test_docs.py",
    "test_engine_processes.py",
    "test_gpu_report.py",
    "test_notebook_page.py",
    "test_package.py",
    "test_parity_processes.py",
    "test_precision.py",
    "test_precision_float8.py",
    "test_shape.py::test_further_arguments_of_the_trainer_are_lightnings",
    "test_shape.py::test_what_is_added_is_one_file_and_one_line",
)
"""Files whose tests start many processes, compile, or wait: `make test-quick` leaves them out."""

LONG: dict[str, tuple[str, ...]] = {
    "packages/test_packages.py::test_a_package_*": (),
    "packages/test_packages.py::test_further_packages": (),
    "strategies/test_quantized_bases.py::test_a_quantized_base_with_adapters_is_saved_and_resumed_to_the_bit": (
        "single",
    ),
    "test_precision.py::test_nothing_but_weights_loses_digits_under_any_strategy": ("FSDP x2",),
    "metrics/test_item_weights.py::test_it_is_the_same_on_two_processes": (),
    "callbacks/test_bad_step_guard.py::test_every_strategy_refuses_the_same_steps": ("FSDP x2", "ZeRO-3 x2"),
    "test_contract.py::test_a_break_at_any_step_changes_nothing": ("single_device", "ddp"),
    "test_contract.py::*": ("", "single_device", "ddp", "fsdp", "deepspeed_stage_[23]", "*_3_offload", "xla*"),
    "test_contract_callbacks.py::*": ("single-EMAWeightAveraging", "single-BadStepGuard, skip"),
    "callbacks/test_bound_profiler.py::test_a_fused_optimizer_is_advised_with_a_bound_of_its_gain": ("True",),
    "callbacks/test_bound_profiler.py::test_of_several_processes_the_one_that_holds_up_the_others_is_described": (),
    "callbacks/test_bound_profiler.py::test_slow_storage_is_reported": (),
    "callbacks/test_bound_profiler.py::test_what_bounds_a_run_is_named": ("data wait", "compute", "saving"),
    "callbacks/test_checkpoint_folders.py::test_two_processes_write_what_a_second_callback_owed": ("fsdp-False-True",),
    "callbacks/test_checkpoint_monitor.py::test_a_name_without_fields_survives_a_kill_at_any_time": (),
    "callbacks/test_finetuning.py::test_it_trains_as_by_hand_and_a_resumed_run_has_the_same_bits": ("single",),
    "callbacks/test_grad_norm_monitor.py::test_the_norms_are_those_of_one_big_batch": ("single", "FSDP x2"),
    "callbacks/test_weight_averaging.py::test_a_single_process_goes_on_with_any_checkpoint": ("FSDP x2",),
    "callbacks/test_jsonl_logger.py::test_an_interrupted_run_leaves_the_file_of_one_that_was_not": (
        "3-val by epoch",
        "9-val by step",
    ),
    "callbacks/test_mlflow_logger.py::test_a_resumed_run_is_the_same_run_with_each_step_once": ("files",),
    "callbacks/test_wandb_logger.py::test_checkpoints_are_artifacts": ("all",),
    "fault_tolerance/test_children.py::test_an_exception_in_a_forked_child_ends_the_child_alone": (),
    "checkpoint/test_pretrained.py::test_no_process_of_zero_3_holds_more_than_its_shard_and_two_tensors": (),
    "checkpoint/test_optimizer_numbers.py::test_an_optimizers_own_dtypes_survive_under_every_strategy": (
        *("single", "FSDP x2", "ZeRO-3 x2"),
    ),
    "checkpoint/test_quantized_state.py::test_a_resumed_run_has_the_same_bits": (),
    "checkpoint/test_quantized_state.py::test_a_resumed_sharded_run_has_the_same_bits": (),
    "checkpoint/test_quantized_state.py::test_replicas_round_at_random_alike": (),
    "checkpoint/test_quantized_state.py::test_sharded_weights_that_its_optimizer_cannot_update_are_explained": (),
    "checkpoint/test_lightning_file.py::test_a_kill_leaves_a_file_and_a_folder_that_fit": ("*-2-several", "*-3-one"),
    "strategies/test_file_of_shards.py::*": ("FSDP x2", "PP x2", "ZeRO-3 x2"),
    "cli/test_doctor_command.py::test_a_module_that_fails_is_reported_with_its_error": ("*SIGKILL",),
    "cli/test_doctor_command.py::test_processes_that_are_there_already_take_part_and_one_speaks": (),
    "cli/test_export_hugging_face.py::test_from_pretrained_reads_a_model_of_any_layout": ("single", "TP x2", "PP x2"),
    "cli/test_init_command.py::test_the_commands_of_the_readme_work_in_the_copy": ("gpt",),
    "cli/test_checkpoint_import.py::test_a_training_of_lightnings_goes_on_here_with_the_same_bits": ("AdamW",),
    "cli/test_migrate_projects.py::test_a_migrated_project_runs": ("2.x",),
    "cli/test_launch_command.py::test_torchruns_command_of_the_page": (),
    "cli/test_launch_command.py::test_a_killed_worker_costs_one_interval_and_changes_no_bit": (),
    "data/test_combined_resume.py::*": (),
    "data/test_length_grouped_sampler.py::test_two_processes_split_its_batches": (),
    "data/test_worker_lifetime.py::test_persistent_workers_end_with_each_stage": ("plain", "stream"),
    "distributed/test_loopback.py::test_nothing_listens_beyond_the_loopback_and_foreign_bytes_there_change_nothing": (
        "ddp by trainer launch",
    ),
    "distributed/test_rendezvous.py::test_a_rank_that_dies_before_it_joins_is_named_by_all_others": (),
    "distributed/test_rendezvous.py::test_a_run_on_a_taken_port_ends_on_all_ranks": (),
    "distributed/test_others_variables.py::test_they_join_and_train_together": ("open_mpi",),
    "emulated/test_emulated_contract.py::test_a_break_at_any_step_changes_nothing": (),
    "emulated/test_emulated_contract.py::*": ("ddp",),
    "emulated/test_emulated_failure.py::test_the_run_ends_though_a_collective_is_outstanding": (),
    "examples/test_examples.py::test_*_learns": (),
    "emulated/test_emulated_device.py::test_gradients_of_manual_optimization_travel_together_and_on_the_device": (),
    "emulated/test_emulated_device.py::test_numbers_of_items_are_summed_on_the_device": (),
    "examples/test_examples.py::test_causal_lm": (),
    "examples/test_examples.py::test_digits": (),
    "examples/test_examples.py::test_models_of_transformers": ("vit",),
    "examples/test_examples.py::test_models_of_transformers_on_two_processes": (),
    "examples/test_examples.py::test_a_pruned_trial_of_optuna_ends_cleanly": (),
    "examples/test_examples.py::test_population_based_training_with_ray": (),
    "fault_tolerance/test_children.py::test_data_workers_outlive_signals_and_die_with_their_process": ("fork-plain-*",),
    "fault_tolerance/test_children.py::test_children_at_the_exit_of_the_process_that_launches_end": (),
    "fault_tolerance/test_children.py::test_what_user_code_starts_has_the_actions_and_masks_of_before_the_run": (),
    "fault_tolerance/test_late_signals.py::test_the_third_sigterm_ends_a_hung_step_with_its_stacks": ("two",),
    "fault_tolerance/test_collective_check.py::test_a_process_that_waits_where_the_other_cannot_come": ("hybrid",),
    "faults/test_chaos.py::test_a_training_killed_three_times": (),
    "faults/test_chaos.py::test_every_strategy": (),
    "faults/test_kill_matrix.py::test_exit_codes_of_stops": ("SIGTERM-143",),
    "faults/test_kill_matrix.py::test_failures_end_all_and_leave_a_checkpoint": ("error-both",),
    "faults/test_kill_matrix.py::test_failures_under_torchrun": (),
    "faults/test_kill_matrix.py::test_max_restarts_goes_on_from_the_last_checkpoint_of_this_run": ("SIGKILL",),
    "faults/test_kill_matrix.py::test_restarts_by_torchrun": (),
    "faults/test_parallel_trouble.py::*": (),
    "faults/test_points.py::test_killed_there_it_ends_with_the_same_bits": (
        *("in_*", "after_*", "before_*", "on_before_optimizer_step", "on_validation_batch_end", "on_train_epoch_end"),
    ),
    "faults/test_sharded_trouble.py::test_an_agreed_stop_is_saved_and_gone_on_from": (),
    "faults/test_sharded_trouble.py::test_it_goes_on_to_the_same_bits": ("fsdp killed in a step",),
    "loop/test_agreement.py::test_what_differs_is_reported_on_both_ranks_before_the_first_step": (
        "DDP x2-*",
        "*-options of a callback",
        "*-loader validation",
        "*-call stage",
    ),
    "loop/test_agreement.py::test_paths_loggers_and_callbacks_of_one_rank_may_differ": ("FSDP x2",),
    "loop/test_auto_accumulation.py::test_two_processes_agree": (),
    "launchers/test_launcher.py::test_a_signal_to_the_launcher_stops_all_at_one_step": ("SIGTERM-143",),
    "launchers/test_launcher.py::test_an_interrupt_does_not_hide_a_failure": ("after, in training",),
    "launchers/test_launcher.py::test_the_failing_process_decides_the_exit_code": ("raise*", "*SIGKILL"),
    "launchers/test_launcher.py::test_a_program_from_a_pipe_is_not_started_twice": ("arguments2",),
    "launchers/test_launcher.py::test_streams_that_are_closed_stop_nothing": ("<&- >&- 2>&-",),
    "launchers/test_notebook.py::test_an_interrupt_during_a_fork_is_not_lost": (),
    "launchers/test_notebook.py::test_a_process_that_is_killed": (),
    "launchers/test_multinode.py::test_the_place_where_they_meet_is_gone": (),
    "launchers/test_multinode.py::test_a_launcher_is_killed_and_started_again_and_the_bits_are_the_same": (),
    "launchers/test_ray.py::test_killed_workers_in_a_job_of_the_users_and_of_the_command": (),
    "lightning/test_rows.py::test_data_in_order_on_several_processes": (),
    "lightning/test_scripts.py::test_only_the_imports_change": (
        "classifiers-hydra_template",
        "generative-gan",
        "overrides-norms_logged",
        "callbacks-metrics_in_every_hook",
        "callbacks-prediction_writer",
    ),
    "loop/test_hook_changes.py::test_on_two_processes": ("ddp",),
    "loop/test_own_generators.py::test_a_resumed_run_draws_on": ("module", "late", "data", "optimizer", "callback"),
    "loop/test_own_generators.py::test_those_not_in_plain_sight": ("function", "static", "cached", "in_a_queue"),
    "loop/test_left_validation.py::test_all_processes_leave_the_same_validation": ("uneven-ddp",),
    "loop/test_waiting_gradients.py::test_a_resume_inside_a_window_of_the_users_is_exact": ("*-auto",),
    "loop/test_resume.py::test_a_broken_run_ends_with_the_same_bits": (
        "one process-adamw-0workers-*",
        "one process-sgd-*-inside validation",
        "one process-adamw-2workers-inside a window",
        "two processes-sgd-*-mid-epoch",
    ),
    "loop/test_resume.py::test_torchdatas_stateful_loader": (),
    "loop/test_resume.py::test_sigkill": ("one process",),
    "loop/test_step_meaning.py::test_a_split_model_keeps_no_outputs": (),
    "loop/test_step_meaning.py::test_at_the_start_of_a_forward_nothing_of_the_batch_before_is_alive": (
        *("single", "DDP x2", "FSDP x2", "ZeRO-3 x2"),
    ),
    "loop/test_step_meaning.py::test_nothing_but_what_a_hook_keeps_is_alive_at_the_next_forward": (
        *("*-single", "*-FSDP x2", "*-ZeRO-3 x2"),
    ),
    "loop/test_nonfinite.py::test_the_processes_agree_on_what_one_of_them_owns": ("FSDP x2", "ZeRO-3 x2"),
    "model/test_compile_slow.py::test_inductor_gives_the_same_losses": (),
    "model/test_compile_slow.py::test_two_processes": ("setting1-fsdp",),
    "test_gpu_report.py::test_a_part_that_takes_too_long_is_ended_with_its_processes": (),
    "test_gpu_report.py::test_several_devices_train_with_the_losses_of_one": (),
    "test_gpu_report.py::test_without_cuda_the_report_names_all_tests_as_skipped": (),
    "test_package.py::test_the_tests_of_the_sdist_run": (),
    "test_package.py::test_the_wheel_works_away_from_the_repository": (),
    "test_package.py::test_a_type_checker_of_another_project_finds_the_editable_install": (),
    "tuner/test_lr_find.py::test_the_suggestion_trains": ("linear SGD, 8, noise-0", "MLP Adam, 8, noise-1"),
    "tuner/test_lr_find.py::test_where_nothing_descends_no_number_is_suggested": ("constant-0", "random-1"),
    "tuner/test_tuner.py::test_the_largest_batch_that_fits_into_a_limit": ("power",),
    "tuner/test_tuner.py::test_two_processes_find_the_same_curve_and_train_afterwards": ("fsdp",),
    "test_benchmarks.py::test_contenders_do_the_work_and_the_report_is_complete": ("overhead",),
    "test_benchmarks.py::test_growth_measures_every_row": (),
    "test_benchmarks.py::test_the_calls_of_a_step_are_counted": (),
    "test_docs.py::test_commands_run": ("README.md", "tutorials/*", "loggers*"),
    "test_docs.py::test_python_blocks_run_in_order": ("[!tchm]*", "t[!e]*", "checkpoints*", "callbacks*"),
    "test_docs.py::test_what_comes_from_elsewhere_prints_before_and_after_the_same": (),
    "test_docs.py::test_scripts_of_accelerate_print_before_and_after_the_same": (),
    "test_engine_loaders.py::test_a_loop_killed_at_any_save_goes_on_with_the_same_bits": (
        "of_a_variable",
        "one_after_the_other",
        "limited",
    ),
    "test_engine_processes.py::test_two_processes_train_as_one_big_batch_and_resume_to_the_same_bits": ("fsdp",),
    "test_engine_processes.py::test_what_a_strategy_cannot_do_is_refused_in_words": (),
    "test_precision_float8.py::test_a_resumed_run_has_the_same_bits": ("single", "TP x2"),
    "test_precision_float8.py::test_checkpoints_go_between_precisions": ("single", "TP x2"),
    "test_precision_float8.py::test_layers_of_fitting_sizes_are_converted": ("single", "TP x2"),
    "test_precision_float8.py::test_losses_are_near_those_of_float32": ("single-*",),
    "model/test_unsupported.py::test_a_resumed_run_has_the_same_bits": ("single_device-*", "fsdp-*", "*_3-*"),
    "strategies/test_broken_window.py::*": ("single", "DDP x2", "FSDP x2", "PP x2"),
    "strategies/test_call_order.py::test_another_order_on_one_process_is_reported": (
        "swapped-*-FSDP x2",
        "left out-*-ZeRO-1 x2",
        "swapped-*-ZeRO-2 x2",
    ),
    "strategies/test_call_order.py::test_another_order_on_all_processes_trains_as_by_hand": (
        "left out by all-FSDP x2",
    ),
    "strategies/test_changing_buffers.py::*": ("DDP x2", "FSDP x2"),
    "strategies/test_adapters.py::*": ("single", "Lora-*", "IA3-*"),
    "strategies/test_changing_parameters.py::test_the_weights_are_those_of_a_hand_written_loop_*": (
        *(f"DDP x2-{case}" for case in ("unfreeze", "freeze", "add", "replace", "remove", "halve late", "prune")),
        "DDP x2-weight [iw]*",
        *(f"FSDP x2-{case}" for case in ("unfreeze late", "add", "regroup", "reset", "data", "weight late", "module")),
        *(f"FSDP x2-{case}" for case in ("register", "delete", "prune", "halve * a validation", "weight within *")),
        "FSDP x2, SHARD_GRAD_OP-unfreeze",
        "FSDP x2, SHARD_GRAD_OP-halve in a validation",
        "ZeRO-[12] x2-unfreeze",
        "ZeRO-2 x2-halve",
        "ZeRO-2 x2-reset",
        "ZeRO-2 x2-data",
        "ZeRO-2 x2-prune",
        "ZeRO-3 x2-add",
        "ZeRO-3 x2-data",
        "ZeRO-3 x2-halve",
        "ZeRO-3 x2-halve in a validation",
        "ZeRO-3 x2-module",
        "ZeRO-3 x2-unfreeze",
        "ZeRO-3 x2-weight",
    ),
    "strategies/test_strategy_batch_norm.py::*": ("DDP x2", "FSDP x2"),
    "strategies/test_deepspeed_engine.py::test_schedules_reach_cpu_adam": (),
    "strategies/test_fsdp_gradients.py::test_weights_are_those_of_a_hand_written_loop": (
        *("x2-Toggled", "x2-Penalty", "x2-Critic", "x2-HeadsInWindows", "x2-Experts", "x2-Depth"),
    ),
    "strategies/test_foreign_optimizers.py::test_a_resumed_run_has_the_same_bits": ("single", "FSDP x2"),
    "strategies/test_frozen_dtypes.py::*": ("FSDP x2", "ZeRO-3 x2"),
    "strategies/test_full_parameters.py::test_save_pretrained_on_all_processes_writes_full_weights": ("FSDP x2",),
    "strategies/test_full_parameters.py::test_every_hook_may_write_and_save": ("ZeRO-3 x2",),
    "strategies/test_full_parameters.py::test_one_process_alone_after_the_run_is_reported": (),
    "strategies/test_full_parameters.py::test_what_is_read_and_written_is_that_of_one_process": ("ZeRO-3 x2",),
    "strategies/test_full_parameters.py::test_what_uses_shards_as_full_weights_*": ("FSDP x1",),
    "strategies/test_hugging_face_models.py::test_losses_and_gradients_are_those_of_a_hand_written_loop": (
        "TP x2-Llama, tied",
        "CP x2-Gemma3, sliding window in some layers",
        "PP x2-ViT",
        "EP x2-Qwen3-MoE",
    ),
    "strategies/test_model_parallel_in_three.py::*": (),
    "strategies/test_model_parallel_products.py::*": (),
    "strategies/test_full_numbers.py::test_an_optimizer_reads_numbers_of_full_tensors": (
        *("FSDP x2-*", "TP x2-ratio", "TP x2-norm", "PP x2-*"),
    ),
    "strategies/test_later_buffers.py::test_a_resumed_run_has_the_buffer_that_a_step_has_made": (
        *("single", "FSDP x2", "ZeRO-3 x2"),
    ),
    "strategies/test_load_hooks.py::test_the_hooks_see_full_weights": ("single", "FSDP x2", "ZeRO-3 x2"),
    "strategies/test_recomputed_blocks.py::test_weights_are_those_of_a_hand_written_loop": (
        *(
            "Counts-FSDP x2-*",
            "Pops-DDP x2-*",
            "Draws-single-*",
            "Draws-FSDP x2-*",
            "Averages-DDP x2-*",
            "Norm-single-*",
        ),
        *("Norm-FSDP x2-*", "Spectral-FSDP x2-*", "Keeps-single-*", "Defaults-FSDP x2-*", "InPlace-DDP x2-*"),
        *("InPlace-FSDP x2-uncompiled-False", "Penalized-FSDP x2-*"),
    ),
    "strategies/test_self_sharding.py::*": ("DDP x2-*", "ZeRO-3 x2-*"),
    "strategies/test_parallel_cost.py::*": ("FSDP x2", "TP x2", "CP x2, heads", "PP x2", "PP 2 x CP 2"),
    "strategies/test_changes_between_runs.py::test_a_change_of_what_is_empty_is_refused": (),
    "strategies/test_model_parallel.py::test_every_part_has_its_gradient": (
        *("a mask that is computed from tokens", "what is computed of all tokens, with gathered keys"),
        *("as many tokens as features, in the first batch", "forwards that count, in split layers"),
        *("activations that are split along the sequence*", "complex numbers between stages", "a sum over processes*"),
    ),
    "strategies/test_model_parallel.py::test_options_of_strategy_and_trainer_work_together": (
        *("layers built on rank 0 only", "compiled blocks*", "recomputed activations of stages", "windows shorter*"),
    ),
    "strategies/test_model_parallel.py::test_plans_are_verified_in_float32_whatever_the_precision": (
        *("*-bf16-mixed", "blocks with casts*-16-true", "a fused layer-bf16-true"),
    ),
    "strategies/test_side_outputs.py::test_it_trains_as_on_one_process": (
        *("losses in a list, full features", "lists in blocks, and sequences", "a counter before the blocks"),
        *("running means in compiled blocks of a pipeline", "objects that hooks write to", "numbers of parts, to log"),
        *("noise in training", "losses in a list, ZeRO-3", "much, FSDP, compiled"),
    ),
    "strategies/test_model_parallel.py::test_the_processes_of_one_model_draw_the_same_numbers": ("without a seed",),
    "strategies/test_steps_by_hand.py::test_processes_that_use_different_layers_are_refused": (),
    "strategies/test_steps_by_hand.py::test_that_zero_moves_what_a_step_has_not_used_is_said_once": (),
    "strategies/test_steps_by_hand.py::test_weights_are_those_of_a_hand_written_loop": ("single-*", "FSDP x2-*"),
    "strategies/test_strategy_parity.py::test_the_losses_are_those_of_a_hand_written_loop": (
        "single-*",
        "* x2-gpt, tokens",
        "FSDP x2-gpt, tied, in configure_model",
        "FSDP x2-gpt, bf16-mixed",
        "ZeRO-3 x2, CPU offload-gpt, tied and frozen",
        "CP x2, keys-*",
        "PP x2-gpt, trained at its end",
        "*-mixture",
    ),
    "strategies/test_resume_sharded.py::test_a_broken_run_ends_with_the_same_bits": ("fsdp-adamw",),
    "strategies/test_strategy_evaluation.py::*": (
        *(f"*{way}" for way in ("single", "DDP x2", "FSDP x2", "P x2", "ZeRO-3 x2")),
    ),
}
"""Tests for `make test-long`, and the cases of them that stay in `make test`: one of each behaviour and strategy."""

RELEASE = (
    "emulated/test_emulated_contract.py::*",
    "examples/test_examples.py::test_digits",
    "examples/test_examples.py::test_a_pruned_trial_of_optuna_ends_cleanly",
    "examples/test_examples.py::test_*_learns",
    "examples/test_examples.py::test_models_of_transformers_on_two_processes",
    "examples/test_examples.py::test_population_based_training_with_ray",
    "launchers/test_ray.py::*",
    "packages/test_packages.py::test_further_packages",
    "strategies/test_deepspeed_engine.py::test_schedules_reach_cpu_adam",
    "faults/test_chaos.py::test_a_training_killed_three_times",
    "cli/test_launch_command.py::test_a_killed_worker_costs_one_interval_and_changes_no_bit",
    "launchers/test_multinode.py::*",
    "callbacks/test_checkpoint_monitor.py::*",
    "checkpoint/test_quantized_state.py::test_a_resumed_run_has_the_same_bits",
    "checkpoint/test_quantized_state.py::test_replicas_round_at_random_alike",
    "cli/test_tune_command.py::*",
    "fault_tolerance/test_children.py::test_what_user_code_starts_has_the_actions_and_masks_of_before_the_run",
    "model/test_compile_slow.py::test_inductor_gives_the_same_losses",
    "strategies/test_model_parallel_in_three.py::test_a_resumed_run_has_the_same_bits",
    "test_gpu_report.py::test_several_devices_train_with_the_losses_of_one",
)
"""Long tests of about a minute and more, which a sample leaves out: `make test-release` runs them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers = parser.getgroup("tiers")
    tiers.addoption(
        "--sample",
        type=int,
        help="of a test's long cases, run this many, drawn by --seed; 0: one of a test all of whose cases are long",
    )
    tiers.addoption("--seed", type=int, default=0, help="of the sample, and of what tests with `inputs` draw")
    tiers.addoption("--inputs", type=int, default=20, help="how many inputs each test with `inputs` draws")
    tiers.addoption("--minutes", type=float, default=0.5, help="for which a test with `minutes` disturbs trainings")


def pytest_report_header(config: pytest.Config) -> str:
    names = ("sample", "seed", "inputs", "minutes")
    return "tiers: " + ", ".join(f"{name}={config.getoption(name)}" for name in names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        test, _, case = f"{file}::{item.nodeid.partition('::')[2]}".partition("[")
        if any(fnmatchcase(name, pattern) for pattern in SLOW for name in (file, test)):
            item.add_marker(pytest.mark.slow)
        kept = next((kept for pattern, kept in LONG.items() if fnmatchcase(test, pattern)), None)
        if kept is not None and not any(fnmatchcase(case[:-1], pattern) for pattern in kept):
            item.add_marker(pytest.mark.long)
        if "inputs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.drawn)
            item.add_marker(pytest.mark.timeout(900 + 5 * config.getoption("inputs")))
        if "minutes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1800 + 60 * config.getoption("minutes")))
    # With --no-loadscope-reorder files start in this order: the long ones first, so that all workers end together.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if config.getoption("sample") is not None:
        left_out = set(items) - set(sampled(items, config.getoption("sample"), config.getoption("seed")))
        left_out |= {item for item in items if item.get_closest_marker("long") is not None and _is_in(item, RELEASE)}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _is_in(item: pytest.Item, patterns: tuple[str, ...]) -> bool:
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    test = f"{file}::{item.nodeid.partition('::')[2].partition('[')[0]}"
    return any(fnmatchcase(test, pattern) for pattern in patterns)


def sampled(items: list[pytest.Item], size: int, seed: int) -> Iterator[pytest.Item]:
    """Return, of each test's long cases, `size` that depend on nothing but their names and the seed.

    With a size of 0, one case of the tests of which no other case runs.
    """
    cases: dict[str, list[pytest.Item]] = {}
    run_anyway: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("long") is None:
            run_anyway.add(test)
            yield item
        else:
            cases.setdefault(test, []).append(item)
    for test, several in cases.items():
        # By the name of the case: tests of a file that share the processes of a case run the same ones.
        yield from sorted(several, key=lambda item: random.Random(f"{seed} {item.nodeid.partition('[')[2]}").random())[
            : size or test not in run_anyway
        ]


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return the parameters of these names, of those cases of the module that will run.

    For fixtures that run all cases in one start. One name: a list of values; several: of tuples.
    """
    found: dict[Any, None] = {}
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and set(names) <= set(params):
            found[params[names[0]] if len(names) == 1 else tuple(params[name] for name in names)] = None
    return list(found)


Inputs = Iterator[random.Random]


@pytest.fixture
def inputs(request: pytest.FixtureRequest) -> Inputs:
    """Return a random generator for each input that the tier wants; its seed names it in a failure."""
    first = 1_000_000 * request.config.getoption("seed")
    return (Numbered(first + number) for number in range(request.config.getoption("inputs")))


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float:
    """Return the number of minutes for which the tier disturbs trainings."""
    return float(request.config.getoption("minutes"))


class Numbered(random.Random):
    """A random generator that shows its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed_given = seed
        self.shown = f"random.Random({seed})"

    def __repr__(self) -> str:
        return self.shown
