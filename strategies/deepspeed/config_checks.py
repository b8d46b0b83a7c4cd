"""What the installed DeepSpeed and this machine say of a DeepSpeed configuration, before any process is started."""

from __future__ import annotations

import os
import re
import shutil
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.errors import did_you_mean

AUTO = "auto"

KNOWN_KEYS = (
    *("activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet"),
    *("comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor"),
    *("curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last", "datastates_ckpt"),
    *("disable_allgather", "disable_python_gc", "dump_state", "eigenvalue", "elasticity", "expert_parallel"),
    *("flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping"),
    *("gradient_predivide_factor", "graph_harvesting", "hybrid_engine", "log_level", "managed_gradient_accumulation"),
    *("memory_breakdown", "nebula", "optimizer", "pipeline", "prescale_gradients", "progressive_layer_drop"),
    *("quantize_training", "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size"),
    *("sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel", "tensorboard", "timers"),
    *("torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism"),
    *("vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "zero_optimization"),
)
"""The keys that DeepSpeed reads (0.19.8), those included which it knows only to say that they were removed. It has no
model for its top level and ignores other keys without a word, misspelt ones too."""

MODELS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "bfloat16": "bfloat16_config",
    "compile": "compile_config",
    "tensor_parallel": "tensor_parallel_config",
    "hybrid_engine": "hybrid_engine",
}
"""Sections that DeepSpeed reads with a pydantic model, and where its configuration object keeps that."""

OTHER_TOOLS = {
    "zero_stage": '{"zero_optimization": {"stage": ...}}',
    "offload_optimizer": '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
    "offload_optimizer_device": '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
    "offload_param_device": '{"zero_optimization": {"offload_param": {"device": "cpu"}}}',
    "zero3_init_flag": "nothing: layers built in the module's configure_model are divided as they are built",
    "zero3_save_16bit_model": '{"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": true}}',
    "deepspeed_config_file": "DeepSpeedStrategy(config=<that file>)",
    "mixed_precision": "Trainer(precision='16-mixed' or 'bf16-mixed')",
    "distributed_type": "Trainer(strategy='deepspeed')",
    "deepspeed_config": "what stands under it, as DeepSpeed's own JSON",
}
"""Keys of Accelerate's plugin and of its configuration file, and what to give here."""

_NOT_HERE = {
    "pipeline": "the pipeline engine has a loop of its own",
    "sequence_parallel_size": "it needs DeepSpeed's own attention and data loader",
    "autotuning": "it starts its own runs",
}


def key_problems(config: Mapping[str, Any]) -> list[str]:
    """Keys and values that the installed DeepSpeed does not take, one sentence each; values `"auto"` are left out."""
    problems = []
    for key, value in config.items():
        if key in OTHER_TOOLS and key not in KNOWN_KEYS:
            problems.append(f"{key!r} is not a DeepSpeed key. Use {OTHER_TOOLS[key]}.")
        elif key not in KNOWN_KEYS:
            problems.append(f"{key!r} is not a DeepSpeed key, and it would be ignored.{did_you_mean(key, KNOWN_KEYS)}")
        elif key in _NOT_HERE and value not in (None, False, 1, {}, AUTO):
            problems.append(f"{key!r} cannot be used with the trainer: {_NOT_HERE[key]}. Remove it.")
        elif value != AUTO:
            problems += _section_problems(key, value)
    return problems


def whole_problems(config: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed refuses in a configuration without `"auto"` whose parts are all right by themselves."""
    # DeepSpeed compares the global batch with the number of processes, which are not joined yet where this is asked.
    return _refused({key: value for key, value in config.items() if key != "train_batch_size"}, "")


def without_auto(value: Any) -> Any:
    """A copy without the entries of dicts, at any depth, that are `"auto"`."""
    if isinstance(value, Mapping):
        return {key: without_auto(part) for key, part in value.items() if part != AUTO}
    return value


def default_of(section: str, path: tuple[str, ...]) -> Any:
    """What DeepSpeed's model of a section has where nothing is given, as JSON has it.

    Raises:
        KeyError: the section has no model, or that has no such field.
    """
    model = _model(section)
    for name in path[:-1]:
        model = _inner_model(_fields(model)[name].annotation)
    default = _fields(model)[path[-1]].get_default(call_default_factory=True)
    default = default.value if hasattr(default, "value") else default
    # DeepSpeed's integers print themselves as 5e8.
    return int(default) if isinstance(default, int) and not isinstance(default, bool) else default


def check_build_tools(config: Mapping[str, Any], device_type: str) -> list[str]:
    """Compilers and libraries that offloading needs and this machine has not."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    devices = {name: _device(zero.get(name)) for name in ("offload_optimizer", "offload_param")}
    problems = []
    nvme = [name for name, device in devices.items() if device == "nvme"]
    if nvme:
        problems += _operator_problems("AsyncIOBuilder", f"{' and '.join(nvme)} to nvme", device_type)
    if config.get("zero_force_ds_cpu_optimizer") is True and devices["offload_optimizer"] in ("cpu", "nvme"):
        problems += _operator_problems("CPUAdamBuilder", "zero_force_ds_cpu_optimizer", device_type)
    return problems


def _device(section: Any) -> str:
    return str(section.get("device", "none")) if isinstance(section, Mapping) else "none"


def _operator_problems(builder: str, what: str, device_type: str) -> list[str]:
    """Whether DeepSpeed can compile one of its operators, if it was not compiled when it was installed."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import op_builder

    operator = getattr(op_builder, builder)()
    if installed_ops.get(operator.name):
        return []
    missing = [f"{tool} ({how})" for tool, how in _missing_programs(device_type)]
    if missing:
        return [f"{what} has DeepSpeed compile its {operator.name}, which needs on the PATH: {', '.join(missing)}."]
    if operator.is_compatible(verbose=False):
        return []
    library = ": install libaio (Debian and Ubuntu: apt install libaio-dev)" if operator.name == "async_io" else ""
    return [f"{what} needs DeepSpeed's {operator.name}, which cannot be compiled here{library}. Run ds_report to see."]


def _missing_programs(device_type: str) -> Iterator[tuple[str, str]]:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("c++") is None:
        yield compiler, "apt install g++, or set CXX"
    if shutil.which("ninja") is None:
        yield "ninja", "pip install ninja, and have the environment's bin folder on the PATH"
    if device_type == "cuda" and shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        yield "nvcc", "install the CUDA toolkit, or set CUDA_HOME"


def _section_problems(key: str, value: Any) -> list[str]:
    """DeepSpeed's opinion of one top-level entry."""
    if (key in MODELS or key in ("optimizer", "scheduler")) and not isinstance(value, Mapping):
        return [f"{key}={value!r}: give an object, as in DeepSpeed's documentation: {{...}}."]
    if key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        return [] if type(value) is int and value > 0 else [f"{key}={value!r}: give a whole number from 1, or 'auto'."]
    if key == "gradient_clipping":
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
        return [] if number else [f"{key}={value!r}: give a number, 0 for no clipping, or 'auto'."]
    return _refused({key: without_auto(value)}, key)


def _refused(config: dict[str, Any], key: str) -> list[str]:
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config})
    except ValidationError as error:
        return [_sentence(key, dict(found)) for found in error.errors()]
    # Whatever DeepSpeed raises on reading a configuration is its opinion of it: it uses every kind, KeyError too.
    except Exception as error:
        text = re.sub(r"\s+", " ", str(error)).strip()
        return [f"{key}: {text}" if key and key not in text else text]
    return []


def _sentence(section: str, found: dict[str, Any]) -> str:
    """One of pydantic's findings in words; `section` is empty where it is not known."""
    path = tuple(str(part) for part in found["loc"])
    where = ".".join(path if not section or path[0] == section else (section, *path))
    if found["type"] == "extra_forbidden" and section in MODELS:
        model = _model(section)
        for name in path[:-1]:
            model = _inner_model(_fields(model)[name].annotation)
        return f"{where!r} is not a DeepSpeed key.{did_you_mean(path[-1], _fields(model))}"
    return f"{where}={found['input']!r}: {found['msg'].removeprefix('Value error, ')}."


def _model(section: str) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    return type(getattr(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1}), MODELS[section]))


def _fields(model: Any) -> dict[str, Any]:
    """The fields of a pydantic model under every name that it takes."""
    names = dict(model.model_fields)
    return {**names, **{field.alias: field for field in names.values() if field.alias is not None}}


def _inner_model(annotation: Any) -> Any:
    """The model in an annotation such as `Optional[Model]`."""
    candidates = (annotation, *typing.get_args(annotation))
    return next(candidate for candidate in candidates if hasattr(candidate, "model_fields"))
