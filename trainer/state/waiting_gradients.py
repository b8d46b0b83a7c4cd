"""Keep in checkpoints the gradients of a manual optimization that wait for a later step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from trainer.optimizers import parameters_of
from trainer.strategy import Strategy

if TYPE_CHECKING:
    from trainer.loop.run import Run

log = logging.getLogger("trainer")

_GRADIENT = "gradient"


def waiting_gradients(run: Run) -> list[dict[str, Any]]:
    """Return the gradients that wait, as states of optimizers that have nothing else; [] if there are none. Collective.

    They have the shapes and places of their parameters, as averages of gradients do.
    """
    manual = run.manual
    if manual is None or not any(manual.wait_for(optimizer) for optimizer in run.optimizers):
        return []
    saved = [gradients_of(run.strategy, one, manual.wait_for(one)) for one in run.optimizers]
    stored = any(_holds_gradients(one) for one in saved)
    if not stored and _shows_gradients(run.strategy, _holder(run.optimizers[0])):
        return []  # there are none: another method of the optimizer has used them, or `zero_grad` has dropped them
    if not (stored and manual.synced) and len(run.optimizers) == 1 and run.progress.step > 0:
        log.warning(
            "the checkpoint of step %d lacks gradients that wait for a later step: strategy %r does not show all of "
            "them. An exact resume needs a checkpoint of a step in which the optimizer steps.",
            run.progress.step,
            run.strategy.name,
        )
    return saved if stored else []


def gradients_of(strategy: Strategy, optimizer: Optimizer, wait: bool) -> dict[str, Any]:
    """Return the gradients of an optimizer's parameters as its state, without any if none `wait`. Collective."""
    holder = _holder(optimizer)
    if wait:
        strategy.scale_gradients(optimizer)  # a resumed run only knows the current loss scale
        for parameter in parameters_of([optimizer]):
            if parameter.grad is not None:
                holder.state[parameter][_GRADIENT] = parameter.grad
    return strategy.optimizer_state(holder)


def restore_gradients(run: Run, saved: Sequence[dict[str, Any]]) -> None:
    """Give the gradients that `waiting_gradients` of any strategy returned to the parameters. Collective."""
    for optimizer, state in zip(run.optimizers, saved, strict=False):
        give_gradients(run.strategy, optimizer, state)


def give_gradients(strategy: Strategy, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give the gradients that `gradients_of` returned to the parameters of an optimizer. Collective."""
    holder = _holder(optimizer)
    if _shows_gradients(strategy, holder):
        strategy.load_optimizer_state(holder, state)
        for parameter, of_one in holder.state.items():
            parameter.grad = of_one[_GRADIENT]
    else:
        log.warning("strategy %r does not take the gradients that wait in the checkpoint", strategy.name)


def _holder(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same groups, without options and states."""
    return Optimizer([{"params": group["params"]} for group in optimizer.param_groups], {})


def _shows_gradients(strategy: Strategy, holder: Optimizer) -> bool:
    """Whether the strategy saves the state of an optimizer, instead of an engine's state."""
    first = parameters_of([holder])[0]
    holder.state[first][_GRADIENT] = first.detach()
    shows = _holds_gradients(strategy.optimizer_state(holder))
    holder.state.clear()
    return shows


def _holds_gradients(saved: dict[str, Any]) -> bool:
    return any(_GRADIENT in state for state in saved["state"].values())
