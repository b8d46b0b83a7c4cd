"""Each policy finds the blocks of models of the usual shapes, and says when there are none."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrize

from tests.helpers.examples import example_module
from tests.messages import raises_recorded
from trainer import TrainModule
from trainer.errors import ConfigError
from trainer.model.blocks import BlockPolicy, describe_blocks, find_blocks


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Any) -> Any:
        return self.feed_forward(self.norm(x))


def test_weights_that_are_sharded_already_count_with_what_they_hold() -> None:
    """Parameters under DeepSpeed's zero.Init are empty, with their number of elements in `ds_numel`."""
    unsharded, sharded = (Tree(blocks=nn.ModuleList(Block() for _ in range(3)), head=nn.Linear(8, 2)) for _ in range(2))
    for parameter in sharded.parameters():
        parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
        parameter.data = parameter.data.new_empty(0)
    policies: tuple[BlockPolicy, ...] = ("auto", 100)
    for policy in policies:
        assert list(find_blocks(sharded, policy)) == list(find_blocks(unsharded, policy)) != []


def test_a_layer_with_parametrizations_is_a_block_and_they_are_not() -> None:
    """A parametrization's result may share the memory of its parameter, which a block of its own would free."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    parametrize.register_parametrization(layers[1], "weight", nn.Identity())
    tree = Tree(layers=layers)
    for policy in ("auto", "Linear", 60):
        assert list(find_blocks(tree, policy)) == ["layers.0", "layers.1", "layers.2"]


class Tree(nn.Module):
    """A module with the given children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Any) -> Any:
        return x


class Towers(Tree):
    _no_split_modules = ["Block"]


class LateTowers(Tree):
    _no_split_modules = None


def gpt() -> TrainModule:
    module = example_module("gpt", "module").GPT(layers=2)
    module.configure_model()
    return module


def tied() -> Tree:
    module = Tree(
        embedding=nn.Embedding(100, 8), layers=nn.ModuleList(Block() for _ in range(2)), head=nn.Linear(8, 100)
    )
    module.head.weight = module.embedding.weight
    return module


def names(module: nn.Module, policy: BlockPolicy = "auto") -> list[str]:
    return list(find_blocks(module, policy))


def blocks(count: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(Block(width) for _ in range(count))


TRANSFORMER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        pytest.param(gpt(), ["net.blocks.0", "net.blocks.1"], id="gpt"),
        pytest.param(
            Tree(t=nn.Transformer(num_encoder_layers=2, num_decoder_layers=1, **TRANSFORMER)),
            ["t.encoder.layers.0", "t.encoder.layers.1", "t.decoder.layers.0"],
            id="two stacks",
        ),
        pytest.param(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), ["0", "2"], id="an MLP"),
        pytest.param(
            Tree(stem=nn.Linear(2, 8), layer1=nn.Sequential(Block(), Block()), layer2=nn.Sequential(Block(), Block())),
            ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
            id="stages, as in a ResNet",
        ),
        pytest.param(
            nn.Sequential(nn.Sequential(Block(2), Block(2)), nn.Linear(2, 16), nn.Sequential(Block(16), Block(16))),
            ["0.0", "0.1", "2.0", "2.1"],
            id="stages in a list, the first ones small",
        ),
        pytest.param(
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))),
            ["0", "1"],
            id="a list of lists of plain layers",
        ),
        pytest.param(
            Tree(**{name: Tree(branch=nn.Sequential(Block(), Block())) for name in ("a", "b", "c")}),
            ["a", "b", "c"],
            id="three attributes that hold lists, as in an Inception",
        ),
        pytest.param(
            Tree(text=Tree(layers=blocks(1)), image=Tree(layers=blocks(1))),
            ["text.layers.0", "image.layers.0"],
            id="two towers",
        ),
        pytest.param(
            Tree(layers=nn.ModuleList(Tree(experts=blocks(3)) for _ in range(2))),
            ["layers.0", "layers.1"],
            id="the outermost stack",
        ),
        pytest.param(
            Tree(grid=nn.ModuleList([blocks(1), blocks(2)])), ["grid.0.0", "grid.1.0", "grid.1.1"], id="a list of lists"
        ),
        pytest.param(Tree(layers=blocks(1)), ["layers.0"], id="a stack of one"),
        pytest.param(
            Tree(small=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), layers=blocks(2)),
            ["layers.0", "layers.1"],
            id="a small stack beside a large one",
        ),
        pytest.param(Tree(one=Block(), two=Block(), three=Block()), ["one", "two", "three"], id="repeated attributes"),
        pytest.param(
            Tree(embedding=nn.Embedding(1000, 8), layers=blocks(2)),
            ["embedding", "layers.0", "layers.1"],
            id="most parameters are outside of the stack",
        ),
        pytest.param(tied(), ["layers.0", "layers.1"], id="tied weights stay together"),
        pytest.param(Tree(a=nn.Linear(8, 8), b=Tree(c=nn.Linear(8, 8))), ["a", "b.c"], id="nothing repeats"),
        pytest.param(Tree(one=nn.Linear(2, 2)), ["one"], id="one layer"),
        pytest.param(
            Towers(text=Tree(a=Block(), b=Block()), image=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))),
            ["text.a", "text.b", "image.0", "image.1"],
            id="what Hugging Face declares, and the rest by structure",
        ),
        pytest.param(
            Tree(model=Towers(layers=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), Block(), Block()]))),
            ["model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3"],
            id="declared ones and others in one list",
        ),
        pytest.param(LateTowers(layers=blocks(2)), ["layers.0", "layers.1"], id="nothing declared"),
        pytest.param(nn.Linear(2, 2), [], id="no submodules"),
        pytest.param(Tree(drop=nn.Dropout(), more=nn.ModuleList()), [], id="no parameters"),
    ],
)
def test_auto_finds_the_blocks(module: nn.Module, expected: list[str]) -> None:
    assert names(module) == expected


def test_a_submodule_with_two_names_is_one_block() -> None:
    block = Block()
    assert names(Tree(layers=nn.ModuleList([block, Block(), block]))) == ["layers.0", "layers.1"]


def test_a_stack_that_shares_a_parameter_with_the_rest_is_left_out() -> None:
    module = Tree(layers=blocks(4), head=nn.Linear(8, 8))
    module.head.weight = module.layers[1].feed_forward[0].weight  # type: ignore[union-attr,index]
    assert names(module) == ["layers.0", "layers.2", "layers.3"]
    assert "layers.1" in names(module, "Block")  # the message's advice works


@pytest.mark.parametrize("policy", ["Block", Block, [Block], ["Block"], {f"{__name__}.Block"}])
def test_by_class(policy: BlockPolicy) -> None:
    assert names(Tree(layers=blocks(2), head=nn.Linear(8, 8)), policy) == ["layers.0", "layers.1"]


def test_several_classes_come_children_first() -> None:
    assert names(Tree(layers=blocks(1)), (Block, "Linear")) == [
        "layers.0.feed_forward.0",
        "layers.0.feed_forward.2",
        "layers.0",
    ]


def test_subclasses_count_for_a_class_but_not_for_its_name() -> None:
    module = Tree(inner=Towers(one=nn.Linear(2, 2)))
    assert names(module, Tree) == ["inner"]
    with raises_recorded(ConfigError):
        find_blocks(module, "Tree")


def test_by_size_counts_what_is_not_in_a_block_below() -> None:
    module = Tree(layers=blocks(2), head=nn.Linear(8, 1))
    # Block: two Linears of 72 and a LayerNorm of 16. The ModuleList has 320, and no forward.
    assert names(module, 150) == ["layers.0", "layers.1"]
    assert names(module, 72) == [f"layers.{i}.feed_forward.{j}" for i in (0, 1) for j in (0, 2)]
    assert names(Tree(a=Tree(b=nn.Linear(8, 8), c=nn.Linear(7, 1), d=nn.Linear(7, 1))), 16) == ["a.b", "a"]


def test_by_a_function() -> None:
    module = Tree(layers=blocks(2), head=nn.Linear(8, 1))
    assert names(module, lambda name, child: name.startswith("layers.1.") and isinstance(child, nn.Linear)) == [
        "layers.1.feed_forward.0",
        "layers.1.feed_forward.2",
    ]
    assert "layers" not in names(module, lambda name, child: True)  # a ModuleList is never called


def test_everything_that_matches_nothing_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        find_blocks(Tree(layers=blocks(2), head=nn.Linear(8, 1)), ["Blok", "ModuleList", nn.Conv2d, "Linear"])
    text = str(caught.value)
    assert "no submodule of Tree with a forward is one of ['Blok', 'ModuleList', 'Conv2d']. The classes" in text
    assert "Block (2), Linear (5), Sequential (2), LayerNorm (2), GELU (2)" in text


@pytest.mark.parametrize("policy", [10_000, lambda name, child: False, []], ids=["size", "function", "nothing"])
def test_a_policy_that_cannot_be_is_reported(policy: Any) -> None:
    with raises_recorded(ConfigError):
        find_blocks(Tree(layers=blocks(2)), policy)


def test_describe_blocks() -> None:
    module = Tree(layers=blocks(3), head=nn.Linear(8, 1))
    assert describe_blocks(find_blocks(module, ["Block"])) == "3 x Block (layers.0 to layers.2)"
    found = find_blocks(module, lambda name, child: name in ("layers.0", "head"))
    assert describe_blocks(found) == "Block (layers.0), Linear (head)"
    assert describe_blocks({}) == "nothing"


def test_a_part_of_attention_that_is_never_called_is_no_block() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.attention, self.output = nn.Linear(8, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

    for policy in ("auto", 1):
        found = find_blocks(Model(), policy)
        assert "attention" in found
        assert "attention.out_proj" not in found
