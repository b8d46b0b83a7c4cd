"""`trainer checkpoint export`: write a checkpoint's weights as safetensors files, one tensor in memory at a time."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.arguments import local_path
from trainer.checkpoint.disk import LocalStorage, atomic_file
from trainer.checkpoint.flat_slice import FlatSlice
from trainer.checkpoint.format import evaluated_weights, open_checkpoint
from trainer.checkpoint.safetensors_io import TensorFile, file_chunks, is_native, size_of
from trainer.checkpoint.schema import require
from trainer.checkpoint.shards import StoredTensor
from trainer.cli.checkpoint.find import choose
from trainer.cli.checkpoint.report import plain, size
from trainer.errors import CheckpointError, ConfigError, did_you_mean
from trainer.model.adapters import CONFIG_FILE, WEIGHTS_FILE
from trainer.model.hugging_face import is_processing_file

HF_SHARD_SIZE = 5 * 10**9
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
"""Endings of files that others would read by torch.load."""
INDEX_FILE = "model.safetensors.index.json"


def export(options: argparse.Namespace) -> int:
    """Write the weights that the options select; return the exit code.

    Raises:
        ConfigError: the output exists, or cannot be written in the form that the options ask for.
    """
    out = local_path(options.out)
    if options.peft:
        return _export_adapters(options, out)
    max_size = options.max_shard_size or (HF_SHARD_SIZE if options.hf else None)
    if max_size is None and out.suffix.lower() in PICKLES:
        raise ConfigError(
            f"{out}: export writes safetensors, which torch.load cannot read. Call it "
            f"{out.with_suffix('.safetensors')}, and read it with safetensors.torch.load_file."
        )
    _check_place(out, options.force, "" if max_size is None else INDEX_FILE)
    path = choose(options.path, options.ckpt)
    state = open_checkpoint(path, None, verify=True)
    prefix, configs, expand_tied = options.prefix or "", {}, options.expand_tied
    if options.hf:
        prefix, model = _hugging_face_model(state, options.prefix)
        configs, expand_tied = _configs(model, state), expand_tied or not model["tied"]
    weights, notes = _weights(_held(state, options.ema), prefix, expand_tied)
    weights = _converted(_renamed(weights, options.rename), options.dtype)
    if options.hf:
        configs["config.json"]["dtype"] = _main_dtype(weights)
    written = _write_file(out, weights) if max_size is None else _write_folder(out, weights, max_size, configs)
    notes += [
        f"{name!r} is {weight.dtype}, which safetensors lacks: its bytes are written, as uint8"
        for name, weight in weights.items()
        if not is_native(weight.dtype)
    ]
    for note in notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    print(f"{out}: {len(weights)} tensors, {size(written)}, of {plain(str(path))}")
    return 0


def _check_place(out: Path, force: bool, mark: str) -> None:
    """Raise a ConfigError unless the output can be written.

    Args:
        mark: the output is a folder, and `force` replaces one that has this file; empty: it is a file.
    """
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}: make it first, or write somewhere else.")
    is_export = (out / mark).is_file()
    if out.exists() and not (force and is_export):
        raise ConfigError(f"{out} exists: give another name. --force replaces the file, or the folder, of an export.")


def _export_adapters(options: argparse.Namespace, out: Path) -> int:
    """Write the adapters of PEFT in a checkpoint as its `save_pretrained` does; return the exit code.

    Raises:
        ConfigError: the checkpoint has none, or the output exists.
    """
    if options.hf or options.max_shard_size:
        raise ConfigError("--peft goes without --hf and --max-shard-size: give one of them.")
    _check_place(out, options.force, CONFIG_FILE)
    path = choose(options.path, options.ckpt)
    state = open_checkpoint(path, None, verify=True)
    held = _held(state, options.ema)
    chosen = _adapters(state, options.prefix)
    tensors: dict[str, dict[str, StoredTensor]] = {}
    for name, adapter in chosen.items():
        own = {theirs: held.get(ours) for theirs, ours in (adapter["weights"] or {}).items()}
        stored = {theirs: value for theirs, value in own.items() if isinstance(value, StoredTensor)}
        if not stored or len(stored) < len(own):
            raise ConfigError(
                f"--peft: the checkpoint does not hold all weights that {name!r} saves. Build the module with "
                "load_from_checkpoint, and call save_pretrained of its model."
            )
        tensors[name] = _converted(stored, options.dtype)
    storage, written = LocalStorage(), 0
    with storage.atomic_directory(out, replace=out.exists()) as folder:
        for name, weights in tensors.items():
            place = folder if name == "default" else folder / name
            place.mkdir(exist_ok=True)
            written += storage.write_file(place / WEIGHTS_FILE, file_chunks(weights)).bytes
            text = json.dumps(chosen[name]["config"], indent=2, sort_keys=True) + "\n"
            storage.write_file(place / CONFIG_FILE, [text.encode()])
    count = sum(map(len, tensors.values()))
    print(f"{out}: {', '.join(tensors)}: {count} tensors, {size(written)}, of {plain(str(path))}")
    return 0


def _adapters(state: Mapping[str, Any], prefix: str | None) -> dict[str, Any]:
    """Return the adapters of the PEFT model in a checkpoint, of several the one of `prefix`, by name.

    Raises:
        ConfigError: there is none, or there are several and `prefix` names none of them.
    """
    models = state.get("adapters", {})
    kind = {"config": {str: object}, "weights": ({str: str}, None)}
    require(models, {str: {str: kind}}, "'adapters'")
    if wrong := [name for of_one in models.values() for name in of_one if not re.fullmatch(r"[\w-]{1,100}", name)]:
        raise CheckpointError(f"'adapters' has {plain(wrong[0])!r:.120}, which is not the name of a folder")
    if not models:
        raise ConfigError("--peft: the checkpoint names no adapters of PEFT (a submodule made by get_peft_model).")
    found: dict[str, Any] = models[_chosen("--peft", models, prefix)]
    return found


def _chosen(option: str, models: Mapping[str, Any], prefix: str | None) -> str:
    """Return the prefix of the model to write: the given one, or the only model's."""
    if prefix not in models and (prefix is not None or len(models) > 1):
        raise ConfigError(f"{option}: give --prefix and one of: {', '.join(models)}.")
    return next(iter(models)) if prefix is None else prefix


def _converted(weights: Mapping[str, StoredTensor], dtype: str | None) -> dict[str, StoredTensor]:
    if dtype is None:
        return dict(weights)
    return {name: Converted(weight, getattr(torch, dtype)) for name, weight in weights.items()}


def _held(state: Mapping[str, Any], ema: bool) -> dict[str, Any]:
    """Return the weights to export: the weights of evaluations; with `ema` the averages where there are some.

    Raises:
        ConfigError: the checkpoint has no average.
        CheckpointError: it has no weights.
    """
    weights: Any = state.get("model") if ema else evaluated_weights(state)
    average = state.get("average") if ema else {}
    require(weights, {str: object}, "'model'")
    if not isinstance(average, dict):
        raise ConfigError(
            "--ema: the checkpoint has no average of the weights, as EMAWeightAveraging keeps one from the first "
            "update on. Leave --ema out for the weights themselves."
        )
    return {**weights, **average}


class Converted(StoredTensor):
    """A stored tensor that is converted to another dtype when read, if floating.

    Raises:
        CheckpointError: when read: a number is too large for the dtype.
    """

    def __init__(self, stored: StoredTensor, dtype: torch.dtype) -> None:
        self.shape = stored.shape
        self.dtype = dtype if stored.dtype.is_floating_point else stored.dtype
        self._stored = stored

    def read(self, extent: FlatSlice | None = None) -> torch.Tensor:
        value = self._stored.read(extent)
        converted = value.to(self.dtype)
        if bool((converted.isinf() & ~value.isinf()).any()):
            raise CheckpointError(
                f"a weight of shape {tuple(self.shape)} has numbers up to {value.abs().max():.6g}, too large for "
                f"{self.dtype}: leave --dtype out, or use bfloat16, which has the range of float32"
            )
        return converted


def _hugging_face_model(state: Mapping[str, Any], prefix: str | None) -> tuple[str, dict[str, Any]]:
    """Return the prefix of a Hugging Face model's names in a checkpoint, and what was saved with its weights.

    Raises:
        ConfigError: there is none, or there are several and `prefix` names none of them.
    """
    if "base" in state:
        raise ConfigError(
            "--hf: the checkpoint holds trained weights alone (trainable_only=True); --peft writes adapters. "
            "For a full model: load_from_checkpoint, then merge_and_unload() and save_pretrained of its PEFT model."
        )
    models = state.get("hugging_face", {})
    kind = {"config": {str: object}, "generation_config": ({str: object}, None), "tied": bool}
    require(models, {str: kind}, "'hugging_face'")
    if not models:
        raise ConfigError(
            "--hf: the checkpoint names no Hugging Face model (a submodule with save_pretrained and a config): give "
            "--max-shard-size 5GB and --prefix in its place, and add a config.json by hand; --peft writes adapters."
        )
    chosen = _chosen("--hf", models, prefix)
    return chosen, models[chosen]


def _configs(model: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the files next to the weights of a Hugging Face model, its tokenizer's included."""
    texts = state.get("processing", {})
    require(texts, {str: str}, "'processing'")
    if wrong := [name for name in texts if not is_processing_file(name)]:
        raise CheckpointError(
            f"'processing' has {plain(wrong[0])!r:.100}, which is not a file of a tokenizer or processor"
        )
    configs = {**texts, "config.json": {**model["config"]}}
    return configs | ({"generation_config.json": model["generation_config"]} if model["generation_config"] else {})


def _main_dtype(weights: Mapping[str, StoredTensor]) -> str:
    """Return the name of the floating dtype that most weights have."""
    dtypes = [weight.dtype for weight in weights.values() if weight.dtype.is_floating_point]
    return str(max(dtypes, key=dtypes.count, default=torch.float32)).removeprefix("torch.")


def _renamed(weights: Mapping[str, StoredTensor], rules: list[str]) -> dict[str, StoredTensor]:
    """Return the weights with the replacements of `--rename` in their names.

    Raises:
        ConfigError: a rule is malformed, or gives two weights one name.
    """
    patterns = [(re.compile(pattern), name) for pattern, _, name in (rule.partition("=") for rule in rules)]
    renamed: dict[str, StoredTensor] = {}
    for name, weight in weights.items():
        new = name
        for pattern, replacement in patterns:
            new = pattern.sub(replacement, new)
        if new in renamed:
            raise ConfigError(f"--rename: two weights would be {new!r}, one of them {name!r}.")
        renamed[new] = weight
    return renamed


def _weights(state: dict[str, Any], prefix: str, expand_tied: bool) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the weights to write by name, and notes about those left out."""
    if any(name.startswith(f"{prefix}.") for name in state):
        prefix += "."  # `--prefix net` means the weights of `net`, not `.weight`
    weights: dict[str, StoredTensor] = {}
    first_name: dict[int, str] = {}
    notes = []
    for name in (name for name in state if name.startswith(prefix)):
        short, value = name.removeprefix(prefix), state[name]
        if not isinstance(value, StoredTensor) or not short:
            notes.append(f"{name!r} is not a tensor with a name, and is left out")
        elif id(value) in first_name and not expand_tied:
            notes.append(f"{name!r} is tied to {first_name[id(value)]!r} and written once; --expand-tied writes both")
        else:
            first_name.setdefault(id(value), name)
            weights[short] = value
    if not weights:
        heads = sorted({f"{name.partition('.')[0]}." for name in state})
        raise ConfigError(
            f"no weight's name begins with {prefix!r}.{did_you_mean(prefix, heads)} There are: {', '.join(heads)}."
        )
    return weights, notes


def _write_file(out: Path, weights: Mapping[str, StoredTensor]) -> int:
    """Write one file atomically; return its size."""
    try:
        with atomic_file(out) as temporary:
            return LocalStorage().write_file(temporary, file_chunks(weights)).bytes
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}. Nothing was changed.") from error


def _write_folder(out: Path, weights: Mapping[str, StoredTensor], max_size: int, more: Mapping[str, Any]) -> int:
    """Write files of at most `max_size` bytes of weights (one tensor may be larger) and their index; return their size.

    Args:
        more: texts of further files, or data for JSON files, by their names.
    """
    shards: list[dict[str, StoredTensor]] = [{}]
    room = max_size
    for name, weight in weights.items():
        needed = size_of(weight.dtype, weight.shape)
        if needed > room and shards[-1]:
            shards.append({})
            room = max_size
        shards[-1][name] = weight
        room -= needed
    total, weight_map = 0, {}
    storage = LocalStorage()
    with storage.atomic_directory(out, replace=out.exists()) as folder:
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            storage.write_file(folder / file, TensorFile(shard))
            total += sum(size_of(weight.dtype, weight.shape) for weight in shard.values())
            weight_map.update(dict.fromkeys(shard, file))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for name, content in {INDEX_FILE: index, **more}.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            storage.write_file(folder / name, [text.encode()])
    return total
