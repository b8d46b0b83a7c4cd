"""Gradients are reset as by torch's `zero_grad`, and by an optimizer's own `zero_grad` where it has one."""

from __future__ import annotations

from typing import Any

import torch

from trainer.optimizers import zero_grad_fast


def with_gradients() -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones(2)
    return parameters


def test_all_groups_forget() -> None:
    parameters = with_gradients()
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[2:]}], lr=0.1)
    optimizer.add_param_group({"params": parameters[1:2]})
    zero_grad_fast(optimizer)
    assert [parameter.grad for parameter in parameters] == [None, None, None]


def test_an_optimizer_with_a_way_of_its_own_goes_that_way() -> None:
    class Keeping(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    parameters = with_gradients()
    zero_grad_fast(Keeping(parameters, lr=0.1))
    assert parameters[0].grad is not None
    assert not parameters[0].grad.any()


def test_one_that_was_patched_is_called() -> None:
    calls: list[Any] = []
    optimizer = torch.optim.SGD(with_gradients(), lr=0.1)
    optimizer.zero_grad = lambda *args: calls.append(args)  # type: ignore[method-assign]
    zero_grad_fast(optimizer)
    assert calls == [()]
