"""Find the sizes of a model in a config.json or on the command line, or assume them from a number of parameters."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.model.parallel_cost import Architecture

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "kv_n_heads"),
    "head_dim": ("head_dim",),
    "intermediate": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k"),
}
"""Sizes, and the names that Hugging Face's configs have for them."""
NEEDED = ("layers", "hidden", "heads", "vocabulary")
NOT_GATED = (
    *("gpt2", "gpt_neox", "gpt_neo", "gptj", "gpt_bigcode", "codegen", "opt", "bloom", "falcon", "mpt", "phi", "xglm"),
    *("starcoder2", "nemotron", "arcee", "apertus", "persimmon", "biogpt", "jais2"),
    *("bert", "bert-generation", "camembert", "electra", "ernie", "megatron-bert", "roberta", "xlm-roberta", "vit"),
)
"""Model types whose MLP has two layers."""
TIED = ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3", "gemma3_text")
"""Model types whose head has the weights of the embedding, unless the config says otherwise."""
SIMPLIFIED = {
    r"linear_attn_.*|(use_)?mamba_.*|ssm_.*|conv_L_cache|linear_num_key_heads|lru_width|.*block_types?": (
        "its layers of recurrence or convolution are planned as attention"
    ),
    r"first_k_dense_replace|moe_layer_start_index|mlp_only_layers|(expert|interleave_moe)_layer_.*|decoder_sparse_.*": (
        "its layers without experts are planned with them"
    ),
    r"kv_lora_rank": "its projections of low rank are planned at full size",
    r"word_embed_proj_dim": "its table of positions and its biases are left out",
    r"vision_config|audio_config": "its layers for images or sound are left out",
    r"cross_attention_layers": "its layers of cross-attention are planned as others",
}
"""Names in configs that say what the plan leaves out, and the words for it."""
OF_ONE = ("moe_layer_start_index", "first_k_dense_replace", "linear_attn_alpha_factor")
"""Those of which 1 says something; a step or period of 1 does not."""


def read_config(path: str) -> tuple[Architecture, list[str]]:
    """Return the sizes in a model's config.json, and notes on what the model has beyond these.

    Raises:
        ConfigError: there is no such file, or it does not have the sizes, or is that of an encoder-decoder.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: give the config.json of a Hugging Face model. {error}") from error
    for part in ("text_config", "attn_config", "ffn_config"):  # of a model for texts and images, and of DBRX
        if isinstance(config, dict) and isinstance(config.get(part), dict):
            config = {**config[part], **config, **(config[part] if part == "text_config" else {})}
    if not isinstance(config, dict):
        raise ConfigError(f"--config {path}: give the config.json of a Hugging Face model; this is not a JSON object.")
    if config.get("is_encoder_decoder"):
        raise ConfigError(
            f"--config {path} is of an encoder-decoder, and a plan is made for one stack of layers: give --layers, "
            "--hidden, --heads and --vocab of one with as many parameters."
        )
    found = {size: _first(config, names) for size, names in NAMES.items()}
    missing = [size for size in NEEDED if found[size] is None]
    if missing:
        raise ConfigError(
            f"--config {path} does not say {', '.join(missing)} (by names such as {NAMES[missing[0]][0]}): give "
            "--layers, --hidden, --heads and --vocab instead."
        )
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # whatever else Falcon's says
        found["kv_heads"] = 1
    each = found["intermediate"] if found["experts"] else None
    shared = _first(config, ("shared_expert_intermediate_size", "shared_intermediate_size"))
    found["shared"] = shared or (each or 0) * (
        _first(config, ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"))
        or int("intermediate_size_mlp" in config)  # of Llama 4, which has one
    )
    kind = config.get("model_type", "")
    tied = config.get("tie_word_embeddings", kind in TIED)
    notes = simplified(config)
    if found["experts"] is None and (unknown := [name for name in config if "expert" in name and config[name]]):
        notes.append(f"the config has {unknown[0]}, but no number of experts by a known name: planned without experts")
    return complete(found, gated=kind not in NOT_GATED, tied=bool(tied)), notes


def simplified(config: Mapping[str, Any]) -> list[str]:
    """Return a note for each part of the model that is planned as something else, or left out."""
    # An empty list says that there is nothing of the kind.
    said = [name for name, value in config.items() if value and value is not True and (value != 1 or name in OF_ONE)]
    notes = []
    for pattern, words in SIMPLIFIED.items():
        if found := [name for name in said if re.fullmatch(pattern, name)]:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            notes.append(f"the config has {found[0]}{more}: {words}, so that parameters, memory and times are rough")
    return notes


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def architecture_of_options(given: Namespace) -> Architecture:
    """Return the sizes that the command line gives.

    Raises:
        ConfigError: one is missing, or they contradict each other.
    """
    missing = [f"--{'vocab' if size == 'vocabulary' else size}" for size in NEEDED if getattr(given, size) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} missing: give --config model/config.json, or --layers, --hidden, --heads and "
            "--vocab, or --params 70b."
        )
    if given.head_dim is None and given.hidden % given.heads:
        raise ConfigError(f"--hidden {given.hidden} is not a multiple of --heads {given.heads}: give --head-dim.")
    if given.kv_heads is not None and given.heads % given.kv_heads:
        raise ConfigError(f"--kv-heads {given.kv_heads} does not divide --heads {given.heads}.")
    return complete({size: getattr(given, size) for size in NAMES}, gated=not given.no_gate, tied=given.tied)


def complete(sizes: Mapping[str, int | None], gated: bool, tied: bool) -> Architecture:
    """Return an architecture with the usual sizes where none is given."""
    known = {size: value for size, value in sizes.items() if value is not None}
    hidden, heads = known["hidden"], known["heads"]
    usual = {
        "kv_heads": heads,
        "head_dim": max(1, hidden // heads),
        "intermediate": -(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden,
        "experts_per_token": min(2, known.get("experts", 1)),
    }
    return Architecture(**{**usual, **known}, gated=gated, tied=tied)


def assumed(parameters: int) -> Architecture:
    """Return a decoder of about this many parameters, in the proportions of Llama: 128 times as wide as it is deep."""
    step = 1024 if parameters > 3e9 else 256
    hidden = max(step, round((parameters * 128 / 12) ** (1 / 3) / step) * step)
    heads = hidden // (128 if hidden >= 2048 else 64)
    kv_heads = 8 if parameters >= 3e10 and heads % 8 == 0 else heads
    vocabulary = 128_256 if parameters >= 1e9 else 32_000
    one = complete(
        {"layers": 1, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "vocabulary": vocabulary},
        gated=True,
        tied=parameters < 1e9,
    )
    block = one.sharded + one.full
    layers = max(1, round((parameters - one.parameters + block) / block))
    # A number that pipelines can divide.
    layers = round(layers / 4) * 4 if layers > 8 else layers
    return Architecture(**{**vars(one), "layers": layers})


def describe(model: Architecture) -> str:
    """Return the sizes in a line."""
    heads = f"{model.heads} heads of {model.head_dim}"
    heads += f" ({model.kv_heads} of keys)" if model.kv_heads != model.heads else ""
    mlp = f"{'gated ' if model.gated else ''}MLP of {model.intermediate}"
    mlp = f"{model.experts} experts ({model.experts_per_token} for a token), each a {mlp}" if model.experts > 1 else mlp
    mlp += f", and one of {model.shared} for all tokens" if model.shared else ""
    words = f"{model.layers} layers, width {model.hidden}, {heads}, {mlp}, vocabulary {model.vocabulary}"
    return f"{model.parameters / 1e9:,.2f} billion parameters: {words}{', tied' if model.tied else ''}"
