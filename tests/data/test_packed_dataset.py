"""PackedDataset: rows of complete documents, with the logits of the documents by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.compare import assert_same_bits
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from trainer import ConfigError, TrainModule, seed_everything
from trainer.callbacks import ModelCheckpoint
from trainer.data.packed_dataset import PackedDataset, attention_mask

transformers = pytest.importorskip("transformers")


def documents(number: int = 23) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (number,), generator=generator).tolist()
    return [torch.randint(1, 50, (length,), generator=generator).tolist() for length in lengths]


def llama() -> Any:
    seed_everything(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def test_every_token_is_in_one_row_with_its_position_and_label() -> None:
    given = documents()
    packed = PackedDataset(given, 24, pad_token_id=0)
    found: list[list[int]] = []
    for number in range(len(packed)):
        row = packed[number]
        assert {key: (tuple(value.shape), value.dtype) for key, value in row.items()} == dict.fromkeys(
            ("input_ids", "position_ids", "labels", "document_ids"), ((24,), torch.int64)
        )
        for document in row["document_ids"].unique().tolist():
            here = row["document_ids"] == document
            assert row["position_ids"][here].tolist() == list(range(int(here.sum())))
            tokens, labels = row["input_ids"][here].tolist(), row["labels"][here].tolist()
            if document == -1:
                assert set(labels) == {-100}
                assert set(tokens) == {0}
            else:
                assert labels == [-100, *tokens[1:]]
                found.append(tokens)
    pieces = [document[start : start + 24] for document in given for start in range(0, len(document), 24)]
    assert sorted(found) == sorted(pieces)
    assert len(packed) * 24 < 1.2 * sum(map(len, given))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_logits_of_a_llama_are_those_of_the_documents(implementation: str, masked: bool) -> None:
    model = llama().eval()
    model.set_attn_implementation(implementation)
    packed = PackedDataset(documents(), 24)
    with torch.no_grad():
        batch = torch.utils.data.default_collate([packed[number] for number in range(len(packed))])
        mask = None
        if masked:
            allowed = attention_mask(batch["document_ids"])
            mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        logits = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask, use_cache=False
        ).logits
        for row in range(len(packed)):
            for document in set(batch["document_ids"][row].tolist()) - {-1}:
                here = batch["document_ids"][row] == document
                alone = model(input_ids=batch["input_ids"][row][here][None], use_cache=False).logits[0]
                torch.testing.assert_close(logits[row][here], alone, rtol=1e-5, atol=1e-5)


class Language(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        documents = batch.pop("document_ids")
        assert documents.shape == batch["input_ids"].shape
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    weights = []
    for name, pieces in (("unbroken", (10,)), ("broken", (3, 7, 10))):
        for steps in pieces:
            module = Language()
            checkpoints = ModelCheckpoint(dirpath=tmp_path / name)
            trainer = quiet(max_steps=steps, enable_checkpointing=True, callbacks=[checkpoints])
            loader = DataLoader(PackedDataset(documents(), 32), batch_size=2, shuffle=True)
            trainer.fit(module, loader, ckpt_path="last")
        weights.append(module.state_dict())
    assert_same_bits(weights[1], weights[0])


def test_documents_of_a_hugging_face_dataset() -> None:
    rows = [{"input_ids": tokens, "attention_mask": [1] * len(tokens)} for tokens in documents()]
    assert_same_bits(
        [*PackedDataset(rows, 24)], [*PackedDataset(documents(), 24, lengths=[len(one) for one in documents()])]
    )


@pytest.mark.parametrize(
    "arguments",
    [([[1, 2]], 1), ([[1, 2]], 8, 0, [1, 2])],
    ids=["length", "lengths"],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with raises_recorded(ConfigError):
        PackedDataset(*arguments)
