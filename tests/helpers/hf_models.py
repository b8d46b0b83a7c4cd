"""Small Hugging Face models of many architectures, randomly initialised, and batches for them with padding."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from trainer import TrainModule

VOCABULARY, LENGTH, SAMPLES = 32, 12, 32
LLM: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
BERT = {key: value for key, value in LLM.items() if key != "num_key_value_heads"}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, tied": ("Llama", {**LLM, "tie_word_embeddings": True}),
    "Mistral, sliding window": ("Mistral", {**LLM, "sliding_window": 5}),
    "Qwen2": ("Qwen2", LLM),
    "Qwen3": ("Qwen3", {**LLM, "head_dim": 8}),
    "Gemma3, sliding window in some layers": (
        "Gemma3Text",
        {**LLM, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "GPT-2": (
        "GPT2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPT-NeoX": ("GPTNeoX", LLM),
    "OPT": ("OPT", {**BERT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Phi3": ("Phi3", LLM),
    "OLMo 2": ("Olmo2", LLM),
    "Granite": ("Granite", LLM),
    "StarCoder2": ("Starcoder2", LLM),
    "Mixtral": ("Mixtral", {**LLM, "num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", {**LLM, **MIXTURE, "head_dim": 8, "num_experts": 4}),
    "OLMoE": ("Olmoe", {**LLM, **MIXTURE, "num_experts": 4}),
    "DeepSeek-V2": (
        "DeepseekV2",
        {
            **LLM,
            **MIXTURE,
            **dict.fromkeys(("num_key_value_heads", "n_routed_experts", "qk_rope_head_dim"), 4),
            **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8),
            **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group"), 1),
            "topk_method": "greedy",
        },
    ),
    "Llama 4": (
        "Llama4Text",
        {
            **LLM,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
        },
    ),
    "GPT-OSS": ("GptOss", {**LLM, "head_dim": 8, "num_local_experts": 4, "sliding_window": 5}),
}
"""Names -> the prefix of the classes, and the arguments of the config."""
OTHERS = ("BERT", "ViT")
ARCHITECTURES = (*CAUSAL, *OTHERS)
WITHOUT_PLAN = ("GPT-2", "OPT")
"""Models without a plan for tensor parallelism; OPT's attention has its number of heads in it."""
BERT_LAYERS = "net.bert.encoder.layer.*"
VIT_LAYERS = "net.vit.layers.*"
PLANS: dict[str, dict[str, str]] = {
    "BERT": {
        f"{BERT_LAYERS}.attention.self.[qkv]*": "colwise",
        f"{BERT_LAYERS}.attention.output.dense": "rowwise",
        f"{BERT_LAYERS}.intermediate.dense": "colwise",
        f"{BERT_LAYERS}.output.dense": "rowwise",
    },
    "ViT": {f"{VIT_LAYERS}.attention.[qkv]_proj": "colwise", f"{VIT_LAYERS}.attention.o_proj": "rowwise"},
}
"""Plans of one's own, for models that have none."""
MIXTURES = ("Mixtral", "Qwen3-MoE", "OLMoE", "DeepSeek-V2", "GPT-OSS")


def make(architecture: str) -> Any:
    """Return a model with random weights, without dropout."""
    import transformers

    if architecture == "BERT":
        config = transformers.BertConfig(**BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return transformers.BertForMaskedLM(config)
    if architecture == "ViT":
        sizes = {key: BERT[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(
                **sizes, num_attention_heads=4, image_size=12, patch_size=4, num_channels=1, num_labels=5
            )
        )
    prefix, options = CAUSAL[architecture]
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if prefix in ("GPT2", "Phi3") else {}
    dropout = {"dropout": 0.0} if prefix == "OPT" else dropout
    config = getattr(transformers, f"{prefix}Config")(**options, **dropout)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if prefix == "OPT":  # it registers its last norm before its blocks
        decoder = model.model.decoder
        last = decoder.final_layer_norm
        del decoder.final_layer_norm
        decoder.final_layer_norm = last
    return model


def data(architecture: str) -> list[dict[str, torch.Tensor]]:
    """Return samples, of which every third one is padded."""
    generator = torch.Generator().manual_seed(1)
    if architecture == "ViT":
        images = torch.randn(SAMPLES, 1, 12, 12, generator=generator)
        return [{"pixel_values": image, "labels": (image.sum() > 0).long()} for image in images]
    samples = []
    for number in range(SAMPLES):
        tokens = (torch.randint(3, 9, (), generator=generator) + torch.arange(LENGTH) * (1 + number % 3)) % 29 + 3
        mask = torch.ones(LENGTH, dtype=torch.int64)
        if number % 3 == 0:
            mask[LENGTH - 1 - number % 5 :] = 0
        tokens = torch.where(mask == 1, tokens, 0)
        samples.append({"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)})
    return samples


class HFModule(TrainModule):
    """Train a Hugging Face model by the loss that it computes itself."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self.architecture = architecture
        torch.manual_seed(5)
        self.net = make(architecture)
        self.tensor_parallel_plan = PLANS.get(architecture, {})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=False, weight=self.num_items(batch))
        return loss

    def num_items(self, batch: Any) -> int | None:
        """Return the number of tokens in the loss; of a causal model, which shifts the labels, not the first ones."""
        if self.architecture == "ViT":
            return None
        labels = batch["labels"] if self.architecture == "BERT" else batch["labels"][:, 1:]
        return int((labels != -100).sum())

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=3e-3)
