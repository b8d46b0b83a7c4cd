"""Read pretrained weights by slices: a safetensors file, or a folder as Hugging Face's `save_pretrained` writes it."""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.checkpoint.deserialization import from_json
from trainer.checkpoint.flat_slice import FlatSlice
from trainer.checkpoint.format import FilePart, FileTensor
from trainer.checkpoint.safetensors_io import DTYPES, read_header, size_of
from trainer.checkpoint.saved_names import as_the_model_names_them
from trainer.checkpoint.schema import Integer, require, wrong
from trainer.checkpoint.storage import (
    HashedReader,
    StoragePath,
    as_storage_path,
    read_small_file,
    reading,
    real_path,
    storage_of,
)
from trainer.errors import CheckpointError, ConfigError, first_of
from trainer.model.adapters import options_made_of_weights, without_adapters

log = logging.getLogger("trainer")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_INDEX = 100_000_000
_COMPARED = 2**16
"""Values from each of three places that are compared, where two tensors of the file are one in the module."""
_SAMPLED = 2**10
"""Values of each tensor that are compared between processes."""
_ENTRY = {"dtype": tuple(DTYPES), "shape": [Integer()], "data_offsets": [Integer()]}
"""The kind of a tensor's entry in the header of a safetensors file (see `schema.Kind`)."""


def weights_problem(path: str | Path) -> str | None:
    """Return what is wrong with the argument `weights`; None if there is a file to read."""
    place = as_storage_path(path, "weights")
    files = (place,) if place.name.endswith(".safetensors") else (place / SINGLE, place / INDEX)
    if any(file.exists() for file in files):
        return None
    return (
        f"weights={str(path)!r}: there is no {SINGLE} and no {INDEX}. Give a .safetensors file, or a folder that "
        "save_pretrained of transformers has written; a checkpoint of this package is given as ckpt_path=."
    )


def open_weights(path: str | Path) -> dict[str, FileTensor]:
    """Return the tensors of a file or folder by name. Only headers are read.

    Raises:
        ConfigError: there is no such file or folder.
        CheckpointError: a file is missing or damaged.
    """
    if (problem := weights_problem(path)) is not None:
        raise ConfigError(problem)
    place = as_storage_path(path)
    if place.name.endswith(".safetensors"):
        return dict(_tensors_of(place))
    index = place / INDEX
    if (place / SINGLE).exists():  # before an index, as in transformers
        return dict(_tensors_of(place / SINGLE))
    content = from_json(read_small_file(real_path(index), _MAX_INDEX), str(index))
    require(content, {"weight_map": {str: str}}, str(index))
    where: dict[str, str] = content["weight_map"]
    files = {*where.values()}
    if not all(re.fullmatch(r"[^/\\]+\.safetensors", name) for name in files):
        raise CheckpointError(f"{index} names files that are not safetensors files of the same folder")
    found = {name: dict(_tensors_of(place / name)) for name in files}
    missing = [name for name, file in where.items() if name not in found[file]]
    if missing:
        raise CheckpointError(f"{index} names {first_of(missing)}, which {where[missing[0]]} does not have")
    return {name: found[file][name] for name, file in where.items()}


def _tensors_of(path: StoragePath) -> list[tuple[str, FileTensor]]:
    """Return the tensors of a safetensors file, whose header has to describe places within it."""
    file_path = real_path(path)  # the cache of the Hugging Face hub has links to the files of a revision
    with reading(path), storage_of(path).open_file(file_path) as (file, size):
        header, first = read_header(HashedReader(file, None, str(path)), size, str(path))
    if problem := wrong(header, {str: _ENTRY}, "its header"):
        raise CheckpointError(f"{path} is damaged, or has tensors that cannot be read: {problem}")
    return [(name, _tensor(file_path, first, size, name, entry)) for name, entry in header.items()]


def _tensor(path: StoragePath, first: int, size: int, name: str, entry: dict[str, Any]) -> FileTensor:
    dtype, shape, span = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if len(span) != 2 or span[1] - span[0] != size_of(dtype, shape) or first + span[1] > size:
        raise CheckpointError(f"{path}: the bytes of {name!r:.100} are not where they must be: it is damaged")
    return FileTensor(name, shape, dtype, [FilePart(path, first + span[0], FlatSlice(0, math.prod(shape)))])


def weights_for(
    module: nn.Module, weights: Mapping[str, FileTensor], key_mapping: Mapping[str, str], strict: bool
) -> dict[str, FileTensor]:
    """Return pretrained weights by the names of the module's `state_dict`; a tied weight by all of its names.

    A model that is an attribute of the module is found by its names: the weights get the prefix that makes most of
    their names known to the module.

    Args:
        module: with its layers, not sharded yet.
        key_mapping: regular expressions for names, and their replacements, applied first and in order.
        strict: refuse weights that the module does not have, and the other way round.

    Raises:
        CheckpointError: names or shapes differ.
    """
    own = module.state_dict(keep_vars=True)
    plain = without_adapters(module, own)
    known = {*own, *filter(None, plain.values())}
    named = _by_names_of(module, as_the_model_names_them(module, _mapped(weights, key_mapping)), known)
    found = {name: named[name] for name in own if name in named}
    found |= {name: named[other] for name, other in plain.items() if other in named and name not in named}
    problems = _two_values(own, found)
    _add_ties(own, plain, found)
    problems += _misfits(own, found)
    used = {*found, *(plain[name] for name in found)}
    lacks = {name: f"the weights lack {name}" for name in own if name not in found}
    others = [f"the module lacks {name}" for name in named if name not in used]
    if problems or not found or (strict and (lacks or others)):
        problems += [*others[:2], *lacks.values(), *others[2:]]
        raise CheckpointError(
            f"the weights do not fit {type(module).__name__}: {first_of(problems, 5)}. In the module, key_mapping "
            "renames weights, and strict_loading = False leaves out those that only one of the two has."
        )
    not_loaded = [words for name, words in lacks.items() if plain[name] is not None] + others
    if not_loaded:
        log.warning("strict_loading is False, and not all is loaded: %s", first_of(not_loaded, 5))
    return found


def _add_ties(own: Mapping[str, torch.Tensor], plain: Mapping[str, str | None], found: dict[str, FileTensor]) -> None:
    """Give a tied weight, and a copy of a weight that adapters keep, to all of its names."""
    of_tensor = {id(own[name]): value for name, value in reversed(found.items())}
    found |= {name: of_tensor[id(tensor)] for name, tensor in own.items() if id(tensor) in of_tensor}
    copies = {plain[name]: value for name, value in found.items() if plain[name] is not None}
    found |= {name: copies[other] for name, other in plain.items() if other in copies and name not in found}


def _by_names_of(module: nn.Module, weights: Mapping[str, FileTensor], known: Container[str]) -> dict[str, FileTensor]:
    """Return weights with the prefix that makes most of their names known."""
    prefixes = ["", *(f"{name}." for name, _ in module.named_modules() if name)]
    prefix = max(prefixes, key=lambda one: sum(one + name in known for name in weights))
    return {f"{prefix}{name}": value for name, value in weights.items()}


def _two_values(own: Mapping[str, torch.Tensor], found: Mapping[str, FileTensor]) -> list[str]:
    """Return a problem for each tensor of the module that gets two values from the weights."""
    of_tensor: dict[int, FileTensor] = {}
    problems = []
    for name, value in found.items():
        other = of_tensor.setdefault(id(own[name]), value)
        if other is not value and not _looks_equal(value, other):
            problems.append(
                f"{name} has other values in the weights than {other.name}, and is one with it in the module: have the "
                "module not tie them (tie_word_embeddings=False in a config)"
            )
    return problems


def _misfits(own: Mapping[str, torch.Tensor], found: Mapping[str, FileTensor]) -> list[str]:
    """Return a problem for each tensor whose shape or dtype does not fit the module's."""
    problems = [
        f"{name} is {list(value.shape)} in the weights and {list(_shape(own[name]))} in the module"
        for name, value in found.items()
        if value.shape != _shape(own[name])
    ]
    return problems + [
        f"{name} is {value.dtype} in the weights and {own[name].dtype} in the module, which may not hold the same "
        "numbers: save them in that dtype, quantized ones dequantized"
        for name, value in found.items()
        if not _can_be_cast(value.dtype, own[name].dtype)
    ]


def refuse_adapters_of_other_weights(module: nn.Module, found: Mapping[str, FileTensor]) -> None:
    """Raise ConfigError if PEFT has computed adapters from weights that are replaced now, without new adapters."""
    options = options_made_of_weights(module)
    added = [
        name for name, plain in without_adapters(module, module.state_dict(keep_vars=True)).items() if plain is None
    ]
    if options and any(name not in found for name in added):
        raise ConfigError(
            f"weights=: {first_of(options)} computes adapters from the weights that the model has when they are added, "
            "which is before weights= is read. Build the base model with from_pretrained, and leave weights= out."
        )


def samples_of(weights: Mapping[str, FileTensor]) -> Iterator[tuple[str, str]]:
    """Yield each tensor's dtype, shape, and a checksum of values in its middle, to tell copies of the weights apart."""
    for name, value in weights.items():
        numel = math.prod(value.shape)
        length = min(numel, _SAMPLED)
        values = value.read(FlatSlice((numel - length) // 2, length)).contiguous()
        yield name, f"{value.dtype} {list(value.shape)} crc32={zlib.crc32(values.view(torch.uint8).numpy().data)}"


def _mapped(weights: Mapping[str, FileTensor], key_mapping: Mapping[str, str]) -> dict[str, FileTensor]:
    """Return weights by the names that the patterns of `key_mapping` make of theirs."""
    names: dict[str, str] = {}
    for name in weights:
        renamed = name
        for pattern, replacement in key_mapping.items():
            renamed = re.sub(pattern, replacement, renamed)
        if renamed in names:
            raise CheckpointError(
                f"key_mapping gives {names[renamed]} and {name} of the weights one name, {renamed}: make its patterns "
                "narrower."
            )
        names[renamed] = name
    return {renamed: weights[name] for renamed, name in names.items()}


def _looks_equal(one: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors are equal in the beginning, the middle and the end."""
    if one.shape != other.shape:
        return False
    numel = math.prod(one.shape)
    length = min(numel, _COMPARED)
    places = {FlatSlice(start, length) for start in (0, (numel - length) // 2, numel - length)}
    return all(_equal(one.read(place), other.read(place)) for place in places)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal values; NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _can_be_cast(stored: torch.dtype, own: torch.dtype) -> bool:
    """Whether numbers of one dtype mean the same in the other one: quantized ones have a scale somewhere else."""
    if stored == own:
        return True
    if stored.is_floating_point != own.is_floating_point or stored.is_complex != own.is_complex:
        return False
    if stored.is_floating_point or stored.is_complex:
        return stored.itemsize > 1
    return np.can_cast(str(stored).removeprefix("torch."), str(own).removeprefix("torch."))


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape, also of a parameter that ZeRO-3 has sharded (locally empty)."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))
