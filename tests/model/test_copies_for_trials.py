"""A module that is copied for a trial works as the original does, and leads to nothing of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.model.copies import deepcopy_with_functions


class Net(nn.Module):
    """Has functions that hold the module, or parts of it, in their closure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(4, 4)
        self.norm: Any = nn.BatchNorm1d(4)
        self.outputs: dict[str, int] = {}
        self.seen: list[Any] = []
        outside: list[int] = []
        calls = 0

        def keep(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                nonlocal calls
                calls += 1
                self.outputs[name] = calls
                outside.append(calls)
                self.seen = outside

            return hook

        def normed(x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return normed(self.norm(x), times - 1) if times else x

        trained: Any = self.layer.weight, self.layer.bias, self.norm.weight
        weight, bias, of_norm = trained
        self.head: Any = lambda x: x @ weight.T
        self.functions: Any = {"list": [normed]}
        self.layer.register_forward_hook(keep("layer"))
        weight.register_hook(lambda gradient: self.halved(gradient))
        bias.register_post_accumulate_grad_hook(self.clear)
        bias.requires_grad_(False)
        weight.lr_mult, of_norm.group = 0.1, [1]

    def halved(self, gradient: torch.Tensor) -> torch.Tensor:
        self.seen.append("gradient")
        return gradient / 2

    def clear(self, parameter: nn.Parameter) -> None:
        parameter.grad = None
        self.seen.append("cleared")

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.functions["list"][0](self.layer(x), times=2))


def trained(module: Net, x: torch.Tensor) -> Any:
    module(x).square().sum().backward()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]
    return state, gradients, dict(module.outputs), list(module.seen)


def test_a_copy_does_what_the_original_does_and_leaves_it_alone() -> None:
    module, x = Net(), torch.randn(8, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    copied = deepcopy_with_functions(module, {})
    state, gradients, *kept = trained(copied, x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert (module.outputs, module.seen) == ({}, [])
    expected_state, expected_gradients, *expected = trained(module, x)
    assert kept == expected == [{"layer": 1}, [1, "gradient"]]
    assert all(torch.equal(value, expected_state[name]) for name, value in state.items())
    assert gradients[1] is expected_gradients[1] is None
    assert all(torch.equal(*pair) for pair in zip(gradients, expected_gradients, strict=True) if pair[0] is not None)
    assert copied.layer.weight.lr_mult == 0.1
    assert copied.norm.weight.group == [1]
    assert copied.norm.weight.group is not module.norm.weight.group
    copied.layer.bias.requires_grad_(True)
    copied(x).sum().backward()
    assert copied.seen.count("cleared") == 1
    assert module.seen == [1, "gradient"]
    assert copied.layer.bias.grad is None


class Deep(nn.Module):
    """Has a function that holds the module, in a list of a part of a part of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.parts = nn.Sequential(nn.Sequential(nn.Sequential(nn.Identity())))
        inner: Any = self.parts[0][0][0]
        inner.functions = {"all": [lambda x: self.layer(x)]}


def test_functions_of_inner_parts_are_copied() -> None:
    module = Deep()
    copied = deepcopy_with_functions(module, {})
    inner: Any = copied.parts[0][0][0]
    inner.functions["all"][0](torch.ones(1, 2)).sum().backward()
    assert copied.layer.weight.grad is not None
    assert module.layer.weight.grad is None
