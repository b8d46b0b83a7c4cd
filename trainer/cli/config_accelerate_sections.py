"""The sections of an Accelerate configuration: one function for each, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.cli.config_deepspeed import finish, from_deepspeed, set_clipping, set_window
from trainer.cli.config_translation import Translation, flag, number
from trainer.config_files import read_tree
from trainer.config_tree import Findings
from trainer.errors import did_you_mean

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


def _fsdp(translation: Translation, given: dict[str, Any]) -> None:
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


def _sharding(translation: Translation, value: Any, name: str) -> None:
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


def _wrapping(translation: Translation, key: str, value: Any, name: str, given: dict[str, Any]) -> None:
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


def _deepspeed(translation: Translation, given: dict[str, Any]) -> None:
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


def _step(translation: Translation, key: str, value: Any, name: str) -> None:
    if str(value).lower() in ("auto", "none"):
        translation.not_needed(name, value, "the trainer's own setting says it")
    elif key == "gradient_accumulation_steps":
        set_window(translation, name, value)
    else:
        set_clipping(translation, name, value)


def _file(translation: Translation, value: Any, name: str) -> None:
    """The JSON that is named there, beside the configuration or where the command is typed."""
    if str(value).lower() == "none":
        translation.not_needed(name, value, "nothing is given")
        return
    candidates = [translation.source.parent / str(value), Path(str(value))]
    path = next((path for path in candidates if path.is_file()), candidates[0])
    findings = Findings()
    tree = read_tree(str(path), findings)
    findings.report()
    assert tree is not None
    translation.taken(name, value, "it is read, see below")
    from_deepspeed(translation, tree.plain(), prefix=f"{path.name}: ")


# -- the others --------------------------------------------------------------------------------------------------------


def _dynamo(translation: Translation, given: dict[str, Any]) -> None:
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


def _parallelism(translation: Translation, given: dict[str, Any]) -> None:
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


def _megatron(translation: Translation, given: dict[str, Any]) -> None:
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


def _fp8(translation: Translation, given: dict[str, Any]) -> None:
    for key, value in given.items():
        words = "there is no fp8 here; its recipes belong to TransformerEngine, torchao and MS-AMP"
        translation.impossible(f"fp8_config.{key}", value, words)


def _mpirun(translation: Translation, given: dict[str, Any]) -> None:
    for key, value in given.items():
        words = "mpirun's own: mpirun -n N --hostfile FILE trainer fit ... is joined by its variables"
        translation.launched(f"mpirun_config.{key}", value, words)


SECTIONS: dict[str, Callable[[Translation, dict[str, Any]], None]] = {
    "fsdp_config": _fsdp,
    "deepspeed_config": _deepspeed,
    "dynamo_config": _dynamo,
    "parallelism_config": _parallelism,
    "megatron_lm_config": _megatron,
    "fp8_config": _fp8,
    "mpirun_config": _mpirun,
}
"""What is done with each section."""
