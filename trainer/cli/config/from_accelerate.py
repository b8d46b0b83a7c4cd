"""Translate an Accelerate configuration (`default_config.yaml`, with the keys of accelerate 1.15)."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.cli.config.from_deepspeed import choose_stage, read_deepspeed, stage_rule
from trainer.cli.config.report import (
    IMPOSSIBLE,
    LAUNCH,
    NOT_NEEDED,
    TAKEN,
    MigrationReport,
    Rule,
    clipping_rule,
    is_off,
    number,
    precision_rule,
    strategy_setting,
    window_rule,
)
from trainer.config.files import read_tree
from trainer.config.tree import Diagnostics

Given = dict[str, Any]
Rules = dict[str, Rule]

KINDS = {"MULTI_GPU": "copies", "MULTI_CPU": "copies", "FSDP": "shards", "XLA": "tpu", "TPU": "tpu"}
"""Layouts by value of distributed_type."""
ON_CPU = ("accelerator", "cpu", "the CPU, even where there is a GPU")
RECOMPUTE = ("activation_checkpointing", "auto", "compute activations again instead of keeping them")
TPU_POD = "gcloud compute tpus tpu-vm ssh {name} --zone {zone} --worker=all --command 'trainer fit ...'"
SAGEMAKER = Rule(
    IMPOSSIBLE,
    "SageMaker is not driven from here: let its PyTorch estimator start `torchrun -m trainer fit --config ...`",
)


def from_accelerate(report: MigrationReport, given: Given) -> None:
    """Translate an Accelerate configuration."""
    kind = _kind(given)
    sagemaker = str(given.get("compute_environment", "")).endswith("SAGEMAKER")
    _read_processes(report, given, kind)
    for key, value in given.items():
        if key == "dynamo_backend":  # the spelling of older versions
            key, value = "dynamo_config", {key: value}
        section = SECTIONS.get(key)
        if section is not None and isinstance(value, dict):
            _section(report, key, section, value, kind)
            continue
        rules = _rules(report, given, kind)  # last: it depends on what the sections before it have set
        if sagemaker:
            rules = {**dict.fromkeys(given, SAGEMAKER), **rules, "compute_environment": SAGEMAKER}
        report.section("", {key: value}, rules)
    if kind == "DEEPSPEED":
        choose_stage(report)


def _kind(given: Given) -> str:
    value = given.get("distributed_type", "NO")
    return "NO" if value in (False, None) else str(value).rpartition(".")[2].upper()


def _read_processes(report: MigrationReport, given: Given, kind: str) -> None:
    """Read the counts and addresses that several keys depend on."""
    report.machines = int(number(given.get("num_machines", 1)) or 1)
    total = number(given.get("num_processes"))
    if total is not None and total > 0 and kind not in ("XLA", "TPU"):
        report.devices = max(1, int(total) // report.machines)
    elif kind == "NO":
        report.devices = 1
    report.port = int(number(given.get("main_process_port")) or 29500)
    report.host = str(given["main_process_ip"]) if given.get("main_process_ip") else None
    if report.devices is not None and not _ids(given):
        report.draft.set("devices", report.devices, "processes on each machine" if report.machines > 1 else "processes")


# -- plain keys --------------------------------------------------------------------------------------------------------


def _rules(report: MigrationReport, given: Given, kind: str) -> Rules:
    several = report.machines > 1
    nodes = ("num_nodes", report.machines, "machines; each of them starts the command above")
    rank = f"--node-rank {given.get('machine_rank')}, on this machine. It can be left out: the machines are numbered"
    alone = Rule(NOT_NEEDED, "on one machine a free port is found", off="nothing is given")
    address = Rule(LAUNCH, f"--rdzv {report.host or 'HOST'}:{report.port}", off="nothing is given")
    xla = "torch_xla no longer casts by itself; --trainer.precision bf16-true stores and computes in bfloat16"
    old_fp16 = "fp16" in given and "mixed_precision" not in given and not is_off(given["fp16"])
    return {
        "compute_environment": Rule(NOT_NEEDED, "it is found out at the start: trainer env shows it"),
        "main_training_function": Rule(NOT_NEEDED, "the configuration names a class (module), not a function"),
        "same_network": Rule(NOT_NEEDED, "machines meet at --rdzv, wherever they are"),
        "rdzv_backend": Rule(NOT_NEEDED, "it is always c10d"),
        "debug": Rule(NOT_NEEDED, "a collective that not all processes make is always reported"),
        "distributed_type": _strategy(report, given, kind),
        "mixed_precision": _precision(report, given, kind),
        "fp16": precision_rule(report, "fp16") if old_fp16 else Rule(NOT_NEEDED, "mixed_precision says it"),
        "num_processes": _num_processes(report, given, kind),
        "num_machines": (
            Rule(TAKEN, f"{{line}}, and --nnodes {report.machines}", (nodes,))
            if several
            else Rule(NOT_NEEDED, "one machine is the default")
        ),
        "machine_rank": Rule(LAUNCH, f"{rank} by themselves") if several else Rule(NOT_NEEDED, "there is one machine"),
        "main_process_ip": address if several else alone,
        "main_process_port": address if several else alone,
        "gpu_ids": _gpu_ids(report, given),
        "use_cpu": Rule(TAKEN, settings=(ON_CPU,), off="GPUs are taken where there are any (accelerator: auto)"),
        "downcast_bf16": Rule(IMPOSSIBLE, xla, off="it is off"),
        "enable_cpu_affinity": Rule(IMPOSSIBLE, "put numactl before the command, or srun --cpu-bind", off="it is off"),
        **_tpu(given),
        **dict.fromkeys(SECTIONS, Rule(IMPOSSIBLE, "it is no section; nothing was done with it", off="it is empty")),
    }


def _tpu(given: Given) -> Rules:
    name = shlex.quote(str(given.get("tpu_name") or given.get("tpu_vm") or "NAME"))
    variables = given.get("tpu_env")
    words = " ".join(map(str, variables)) if isinstance(variables, list) else str(variables)
    pod = Rule(LAUNCH, TPU_POD.format(name=name, zone=given.get("tpu_zone") or "ZONE"), off="nothing is given")
    before = Rule(LAUNCH, "run it on the TPU machines before the training, as you do now", off="nothing is given")
    return {
        "tpu_use_sudo": Rule(NOT_NEEDED, "for Accelerate's own start of a pod"),
        "tpu_env": Rule(LAUNCH, f"set these variables before the command: {words}", off="nothing is given"),
        **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm", "tpu_use_cluster"), pod),
        **dict.fromkeys(("commands", "command_file"), before),
    }


def _strategy(report: MigrationReport, given: Given, kind: str) -> Rule:
    if kind == "DEEPSPEED":
        return Rule(TAKEN, "strategy: deepspeed_stage_..., see deepspeed_config")
    if _shards(given.get("parallelism_config")) > 1 or (kind == "FSDP" and _unsharded(given.get("fsdp_config"))):
        return Rule(NOT_NEEDED, "another key says more")
    copies = (strategy_setting("copies"),)
    if kind == "MEGATRON_LM":
        fsdp = (*strategy_setting("shards")[:2], "in place of Megatron-LM, which is not supported")
        return Rule(IMPOSSIBLE, "no tensor or pipeline parallelism: {line} is written", (fsdp,))
    if kind == "NO" and (report.devices or 1) * report.machines > 1:
        return Rule(TAKEN, "{line}, as there are several processes", copies)
    if kind == "NO":
        return Rule(TAKEN, settings=(strategy_setting("one"),))
    if kind not in KINDS:
        return Rule(IMPOSSIBLE, "no strategy for these devices is tested here; {line} is written", copies)
    more = {"tpu": (("accelerator", "tpu", "TPUs"),)}.get(KINDS[kind], (ON_CPU,) if kind == "MULTI_CPU" else ())
    return Rule(TAKEN, settings=(strategy_setting(KINDS[kind]), *more))


def _precision(report: MigrationReport, given: Given, kind: str) -> Rule:
    value = given.get("mixed_precision")
    name = str(value).lower()
    if name in ("fp16", "bf16"):
        sums = "; gradients are summed in float32 (Accelerate: in this precision, strategy.reduce_dtype)"
        return precision_rule(report, name, sums if kind == "FSDP" else "")
    if name == "fp8":
        setting = ("precision", "bf16-mixed", "in place of fp8, which is not supported")
        return Rule(IMPOSSIBLE, "there is no fp8; {line} is written", (setting,))
    if is_off(value):
        return Rule(TAKEN, settings=(("precision", "32-true", "float32 everywhere"),))
    return Rule(IMPOSSIBLE, "allowed are no, fp16, bf16, fp8; precision is left as it is")


def _num_processes(report: MigrationReport, given: Given, kind: str) -> Rule:
    value, devices, machines = given.get("num_processes"), report.devices, report.machines
    if kind in ("XLA", "TPU"):
        return Rule(NOT_NEEDED, "one process drives all TPU cores of a machine")
    if devices is None:
        return Rule(IMPOSSIBLE, "no number from 1; devices is left at auto: one for each GPU")
    if number(value) != devices * machines:
        return Rule(IMPOSSIBLE, f"cannot be divided by {machines} machines; devices: {devices} is written")
    total = f" on each machine ({value} is the total of {machines})" if machines > 1 else ""
    return Rule(TAKEN, f"devices: {devices}{total}")


def _ids(given: Given) -> list[int]:
    value = given.get("gpu_ids")
    words = str(value).split(",") if value not in (None, "") else []
    return [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else []


def _gpu_ids(report: MigrationReport, given: Given) -> Rule:
    ids, devices = _ids(given), report.devices
    setting = ("devices", ids, "the numbers of the GPUs")
    if not ids:
        return Rule(NOT_NEEDED, "the first GPUs of the machine are used, as many as devices says")
    if devices is not None and devices != len(ids):
        return Rule(IMPOSSIBLE, f"{len(ids)} GPUs, {devices} processes; {{line}} is written", (setting,))
    if not is_off(given.get("use_cpu")):
        return Rule(NOT_NEEDED, "it runs on the CPU", (("devices", devices or len(ids), "processes"),))
    return Rule(TAKEN, settings=(setting,))


# -- sections ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A section's rules.

    Args:
        prefix: the keys' prefix, left out in the rules.
        rules: function from the section's values to the rules by key.
        kind: the only distributed_type that reads the section; "": any.
        other: rule for all other keys; None: unknown keys are mistakes.
    """

    prefix: str
    rules: Callable[[MigrationReport, Given], Rules]
    kind: str = ""
    other: Rule | None = None


def _section(report: MigrationReport, key: str, section: Section, value: Given, kind: str) -> None:
    if section.kind not in ("", kind):
        rule = Rule(NOT_NEEDED, f"distributed_type is {kind}, which does not read it")
        report.section(f"{key}.", value, {}, other=rule)
        return
    rules = section.rules(report, {name.removeprefix(section.prefix): one for name, one in value.items()})
    report.section(f"{key}.", value, rules, section.prefix, section.other)
    file = value.get("deepspeed_config_file")
    if not is_off(file):
        read_deepspeed(report, *_json(report.source, str(file)))


def _json(source: Path, name: str) -> tuple[Given, str]:
    """Read a file that a configuration names (from its folder or the current one); return it and its keys' prefix."""
    candidates = [source.parent / name, Path(name)]
    path = next((path for path in candidates if path.is_file()), candidates[0])
    findings = Diagnostics()
    tree = read_tree(str(path), findings)
    findings.report()
    assert tree is not None
    return tree.plain(), f"{path.name}: "


SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Sharding strategies; Accelerate also accepts their numbers, from 1."""
RESHARD = ("strategy.reshard_after_forward", False, "")


def _fsdp(report: MigrationReport, given: Given) -> Rules:
    offload = Rule(
        TAKEN, settings=(("strategy.cpu_offload", True, ""),), off="nothing is offloaded, which is the default"
    )
    prefetch = Rule(NOT_NEEDED, "FSDP2 always gathers the next block during the backward of this one")
    sharding = {key: _sharding(given.get(key)) for key in ("sharding_strategy", "reshard_after_forward")}
    recompute = {
        "activation_checkpointing": Rule(
            TAKEN, settings=((*RECOMPUTE[:2], f"{RECOMPUTE[2]}, block by block"),), off="it is off"
        )
    }
    ignored = "nothing can be left out of the sharding; --trainer.strategy ddp shards nothing"
    state = "every process writes its part; a checkpoint is read under any strategy"
    rules = {
        "offload_params": offload,
        "cpu_offload": offload,
        **_wrapping(given),
        "ignored_modules": Rule(IMPOSSIBLE, ignored, off="it is off"),
        "activation_checkpointing_offload": Rule(
            IMPOSSIBLE, "activations are computed again, not offloaded", off="it is off"
        ),
        "version": Rule(NOT_NEEDED, "it is FSDP2, torch's fully_shard"),
        "backward_prefetch": prefetch,
        "backward_prefetch_policy": prefetch,
        "forward_prefetch": Rule(NOT_NEEDED, "FSDP2 gathers the next block as soon as the CPU has got there"),
        "use_orig_params": Rule(NOT_NEEDED, "FSDP2 always keeps your parameters and their names"),
        "state_dict_type": Rule(NOT_NEEDED, f"{state}, and trainer checkpoint export writes one file"),
        "cpu_ram_efficient_loading": Rule(
            NOT_NEEDED, "build the layers in configure_model, and give the strategy init_device: mixed"
        ),
        "sync_module_states": Rule(NOT_NEEDED, "all processes begin with rank 0's values"),
        "limit_all_gathers": Rule(NOT_NEEDED, "FSDP2 limits them by itself"),
    }
    if _unsharded(given):
        rules = dict.fromkeys(rules, Rule(NOT_NEEDED, "nothing is sharded, with NO_SHARD"))
    return {**sharding, **recompute, **rules}


def _unsharded(given: Any) -> bool:
    if not isinstance(given, dict):
        return False
    values = {str(value).upper() for key, value in given.items() if key.endswith("sharding_strategy")}
    return bool(values & {"NO_SHARD", "3"})


def _sharding(value: Any) -> Rule:
    text, which = str(value).upper(), number(value)
    if which is not None and not isinstance(value, bool) and 1 <= which <= len(SHARDINGS):
        text = SHARDINGS[int(which) - 1]
    default = Rule(NOT_NEEDED, "FULL_SHARD is the default: weights are given back after the forward")
    named = {
        name: (("strategy.sharding_strategy", name.removesuffix("_ZERO2"), ""),)
        for name in ("SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    }
    rules = {
        "TRUE": default,
        "FULL_SHARD": default,
        "FALSE": Rule(TAKEN, settings=(RESHARD,)),
        "NO_SHARD": Rule(TAKEN, settings=(strategy_setting("copies"),)),
        "SHARD_GRAD_OP": Rule(TAKEN, settings=named["SHARD_GRAD_OP"]),
        "HYBRID_SHARD": Rule(TAKEN, settings=named["HYBRID_SHARD"]),
        "HYBRID_SHARD_ZERO2": Rule(TAKEN, settings=(*named["HYBRID_SHARD_ZERO2"], RESHARD)),
    }
    return rules.get(text, Rule(IMPOSSIBLE, f"none of {', '.join(SHARDINGS)}; FULL_SHARD is written"))


def _wrapping(given: Given) -> Rules:
    policy = str(given.get("auto_wrap_policy", "")).upper()
    none = "nothing is given: the repeated blocks are found by themselves"
    if policy == "NO_WRAP":
        words = "it would gather all weights at once, and save little: the repeated blocks are found by themselves"
    else:
        words = "auto_wrap_policy of the strategy: names, a number, or found by itself"
    unread = Rule(NOT_NEEDED, f"{policy or 'no policy'} does not read it", off=none)
    size = int(number(given.get("min_num_params")) or 0)
    classes = given.get("transformer_layer_cls_to_wrap", given.get("transformer_cls_to_wrap"))
    names = classes if isinstance(classes, list) else [word.strip() for word in str(classes).split(",")]
    by_size = Rule(TAKEN, settings=(("strategy.auto_wrap_policy", size, ""),), off=none)
    by_class = Rule(TAKEN, settings=(("strategy.auto_wrap_policy", names, ""),), off=none)
    wrapped = by_class if policy in ("TRANSFORMER_BASED_WRAP", "") else unread
    return {
        "auto_wrap_policy": Rule(NOT_NEEDED, words, off=none),
        "min_num_params": by_size if size > 0 and policy in ("SIZE_BASED_WRAP", "") else unread,
        "transformer_layer_cls_to_wrap": wrapped,
        "transformer_cls_to_wrap": wrapped,
    }


def _deepspeed(report: MigrationReport, given: Given) -> Rules:
    stage, path = given.get("zero_stage"), "nothing is given"
    auto = Rule(NOT_NEEDED, "the trainer's own setting says it")
    moe = "leaf modules are not set by name: call deepspeed.utils.set_z3_leaf_modules in configure_model"
    msamp = Rule(IMPOSSIBLE, "MS-AMP is not supported; precision: bf16-mixed", off="it is off")
    chosen = Rule(LAUNCH, "start the command on the machines that are meant; GPUs by devices")
    launcher = "trainer launch, torchrun or srun on each machine; nothing logs in to others"
    hosts = "start the command on each of these machines: trainer launch --nnodes ... --rdzv ..."
    window, clipping = given.get("gradient_accumulation_steps"), given.get("gradient_clipping")
    rules = {
        "deepspeed_config_file": Rule(TAKEN, "it is read, see below", off="nothing is given"),
        "zero_stage": (
            stage_rule(report, stage)
            if number(stage) in (0, 1, 2, 3)
            else Rule(IMPOSSIBLE, "none of 0, 1, 2, 3; stage 2 is written")
        ),
        "gradient_accumulation_steps": auto if str(window).lower() in ("auto", "none") else window_rule(window),
        "gradient_clipping": auto if str(clipping).lower() in ("auto", "none") else clipping_rule(clipping),
        "zero3_init_flag": Rule(NOT_NEEDED, "layers that configure_model builds are partitioned when it has ended"),
        "zero3_save_16bit_model": Rule(
            NOT_NEEDED, "checkpoints hold the full weights: trainer checkpoint export --dtype bfloat16"
        ),
        "deepspeed_multinode_launcher": Rule(LAUNCH, launcher),
        "deepspeed_hostfile": Rule(LAUNCH, hosts),
        "deepspeed_inclusion_filter": chosen,
        "deepspeed_exclusion_filter": chosen,
        "deepspeed_moe_layer_cls_names": Rule(IMPOSSIBLE, moe, off="it is off"),
        "enable_msamp": msamp,
        "msamp_opt_level": msamp,
    }
    for key, argument in {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}.items():
        device = str(given.get(f"{key}_device")).lower()
        taken = Rule(TAKEN, settings=((f"strategy.{argument}", device, ""),))
        none = Rule(NOT_NEEDED, "nothing is offloaded, which is the default")
        rules[f"{key}_device"] = taken if device in ("cpu", "nvme") else none
        nvme = ("strategy.nvme_path", given.get(f"{key}_nvme_path"), "")
        rules[f"{key}_nvme_path"] = Rule(TAKEN, settings=(nvme,), off=path)
    return rules


DYNAMO = {
    "mode": "mode",
    "use_fullgraph": "fullgraph",
    "use_dynamic": "dynamic",
    "use_regional_compilation": "blocks",
}


def _dynamo(report: MigrationReport, given: Given) -> Rules:
    backend = str(given.get("backend", "NO")).lower()
    if backend == "no":
        return dict.fromkeys(given, Rule(NOT_NEEDED, "nothing is compiled, which is the default"))
    options: Given = {} if backend == "inductor" else {"backend": backend}
    rules = {"backend": Rule(TAKEN, f"compile.backend: {backend}" if options else "compile: true")}
    for key, name in DYNAMO.items():
        value = given.get(key)
        if is_off(value) or value == "default":
            rules[key] = Rule(NOT_NEEDED, "the default")
        else:
            options[name] = value if key == "mode" else True
            rules[key] = Rule(TAKEN, f"compile.{name}: {str(options[name]).lower()}")
    report.draft.set("compile", options or True, "torch.compile, in place")
    return rules


def _shards(given: Any) -> int:
    """Return the number of processes over which parallelism_config shards."""
    sizes = given if isinstance(given, dict) else {}
    return int(number(sizes.get("parallelism_config_dp_shard_size", sizes.get("dp_shard_size"))) or 1)


def _parallelism(report: MigrationReport, given: Given) -> Rules:
    shards, replicas = _shards(given), int(number(given.get("dp_replicate_size")) or 1)
    hybrid = (
        ("strategy.sharding_strategy", "HYBRID_SHARD", ""),
        ("strategy.device_mesh", [replicas, shards], ""),
    )
    sharded = Rule(TAKEN, settings=(strategy_setting("shards"), *(hybrid if replicas > 1 else ())))
    data = sharded if shards > 1 else Rule(NOT_NEEDED, "every process has the full model: ddp")
    words = "no tensor, context or sequence parallelism; fsdp with activation_checkpointing needs less memory"
    others = [key for key in ("tp_size", "cp_size", "sp_size") if (number(given.get(key)) or 1) > 1]
    return {"dp_replicate_size": data, "dp_shard_size": data, **dict.fromkeys(others, Rule(IMPOSSIBLE, words))}


def _megatron(report: MigrationReport, given: Given) -> Rules:
    clipping, off = given.get("gradient_clipping"), Rule(NOT_NEEDED, "it is off")
    parallel = Rule(IMPOSSIBLE, "no tensor or pipeline parallelism; strategy: fsdp shards the weights")
    degrees = {key: parallel if (number(given.get(key)) or 1) > 1 else off for key in ("tp_degree", "pp_degree")}
    return {
        "recompute_activations": Rule(TAKEN, settings=(RECOMPUTE,), off="it is off"),
        "gradient_clipping": clipping_rule(clipping) if number(clipping) else off,
        **degrees,
        "num_micro_batches": Rule(NOT_NEEDED, "of pipeline parallelism; accumulate_grad_batches makes larger steps"),
        "use_distributed_optimizer": Rule(NOT_NEEDED, "fsdp shards the optimizer, too"),
        "sequence_parallelism": Rule(NOT_NEEDED, "of tensor parallelism"),
    }


def _nothing(report: MigrationReport, given: Given) -> Rules:
    return {}


MEGATRON = Rule(IMPOSSIBLE, "Megatron-LM's own; its model code is not used here", off="it is off")
FP8 = Rule(IMPOSSIBLE, "there is no fp8 here; its recipes belong to TransformerEngine, torchao and MS-AMP")
MPI = Rule(LAUNCH, "mpirun's own: mpirun -n N --hostfile FILE trainer fit ... is joined by its variables")
SECTIONS = {
    "fsdp_config": Section("fsdp_", _fsdp, "FSDP"),
    "deepspeed_config": Section("", _deepspeed, "DEEPSPEED"),
    "dynamo_config": Section("dynamo_", _dynamo),
    "parallelism_config": Section(
        "parallelism_config_", _parallelism, other=Rule(NOT_NEEDED, "this kind of parallelism is off")
    ),
    "megatron_lm_config": Section("megatron_lm_", _megatron, "MEGATRON_LM", MEGATRON),
    "fp8_config": Section("", _nothing, other=FP8),
    "mpirun_config": Section("", _nothing, other=MPI),
}
