"""Rename and join the weights of a Hugging Face model whose files have other tensors than the model, as mixtures do."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from trainer.checkpoint.format import FileTensor
from trainer.model.blocks import outermost


def as_the_model_names_them(module: nn.Module, weights: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return weights by the names of the Hugging Face model in a module, experts that are saved one by one as one.

    Uses the table of transformers' `from_pretrained`; no tensor is read here. Weights with the model's own names stay
    unchanged, and so do weights that need another change, such as a transposition, and all weights of a module with
    several models.
    """
    models = outermost_models(module)
    if len(models) != 1:
        return dict(weights)
    ((prefix, model),) = models.items()
    own = {f"{prefix}{name}" for name in model.state_dict(keep_vars=True)}
    unknown = [name for name in weights if name not in own and f"{prefix}{name}" not in own]
    found = {name: value for name, value in weights.items() if name not in unknown}
    changes = _changes(model) if unknown else []
    joined: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in unknown:
        renamed, change, pattern = _renamed(name, changes)
        if change is None:
            found[renamed] = weights[name]
        else:
            _, sources = joined.setdefault(renamed, (change, {}))
            sources.setdefault(pattern, []).append(name)
    for renamed, (change, sources) in joined.items():
        several = [sorted(sources.get(pattern, ()), key=_numbers) for pattern in change.source_patterns]
        one = _joined(renamed, change, [[weights[name] for name in names] for names in several])
        if one is not None:
            found[renamed] = one
        else:
            found |= {name: weights[name] for name in chain.from_iterable(several)}
    return found


def outermost_models(module: nn.Module) -> dict[str, Any]:
    """Return the Hugging Face models in a module that are in no other one, by the prefixes of their names."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return {}
    return outermost(module, lambda child: isinstance(child, transformers.PreTrainedModel))


def _changes(model: Any) -> list[Any]:
    """Return transformers' changes of names and tensors, those that only rename first."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return sorted(get_model_conversion_mapping(model), key=lambda change: hasattr(change, "operations"))


def _renamed(name: str, changes: Sequence[Any]) -> tuple[str, Any, str]:
    """Return a new name, and the change that joins the weight with others, with its pattern that matches."""
    renamed = name
    for change in changes:
        renamed, pattern = change.rename_source_key(renamed)
        if pattern is not None and hasattr(change, "operations"):
            return renamed, change, pattern
    return renamed, None, ""


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _joined(name: str, change: Any, several: list[list[FileTensor]]) -> FileTensor | None:
    """Return the tensors of all patterns as one; None if they are not simply one after the other in memory."""
    steps = [(type(one).__name__, getattr(one, "dim", None)) for one in change.operations]
    pieces = [*chain.from_iterable(several)]
    counts, kinds = {len(tensors) for tensors in several}, {(tensor.shape[1:], tensor.dtype) for tensor in pieces}
    if len(change.target_patterns) != 1 or len(counts) != 1 or len(kinds) != 1:
        return None
    count, rest = counts.pop(), pieces[0].shape[1:]
    if steps == [("Concatenate", 0)] and count == 1:
        return FileTensor.joined(name, (sum(tensor.shape[0] for tensor in pieces), *rest), pieces)
    of_each = [*zip(*several, strict=True)]
    rows = {sum(tensor.shape[0] for tensor in together) for together in of_each}
    if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]) or len(rows) != 1:
        return None
    return FileTensor.joined(name, (count, rows.pop(), *rest), [*chain.from_iterable(of_each)])
