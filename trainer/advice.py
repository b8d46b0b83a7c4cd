"""Advice: errors of torch that have one usual cause here, and what to type then."""

from __future__ import annotations

from trainer.errors import ConfigError, TrainerError

KNOWN = {
    "Expected to have finished reduction in the prior iteration": (
        "Parameters took no part in the loss of a step. Use strategy=DDPStrategy(find_unused_parameters=True) from "
        "trainer.strategies, or remove them (TORCH_DISTRIBUTED_DEBUG=DETAIL names them)."
    ),
    "backward through the graph a second time": (
        "The trainer calls backward for you: training_step returns the loss and calls no backward. If it did not, then "
        "a tensor of an earlier step is still in use: detach() it. With automatic_optimization = False call "
        "self.manual_backward once for each graph: add losses that share one."
    ),
    "optimizer got an empty parameter list": (
        "configure_optimizers gave an optimizer nothing to train: the module has no parameters there. Make layers "
        "attributes of the module; in a plain list or dict they are not found, use nn.ModuleList or nn.ModuleDict."
    ),
    "must have the same dtype": (
        "Weights and data differ in dtype. Give the data as float32 (batch.float()), or choose the dtype of both with "
        "Trainer(precision=...)."
    ),
    "Inference tensors cannot be saved for backward": (
        "A tensor made in validation or test is used in training. Use Trainer(inference_mode=False), or clone() it."
    ),
    "Inplace update to inference tensor outside InferenceMode": (
        "A tensor made in validation or test is changed in training. Use Trainer(inference_mode=False), or clone() it."
    ),
    "does not have a deterministic implementation": (
        "Use Trainer(deterministic='warn'), or do without that operation."
    ),
    "Expected all tensors to be on the same device": (
        "The trainer moves the module and its batches. Register other tensors with self.register_buffer, or create "
        "them with device=self.device."
    ),
}
"""A part of torch's message -> advice."""


def advised(error: BaseException) -> ConfigError | None:
    """The same error with advice, where there is one for it; its cause is the original, which holds the place."""
    if isinstance(error, TrainerError) or not isinstance(error, (RuntimeError, ValueError)):
        return None
    text = str(error)
    for part, advice in KNOWN.items():
        if part in text:
            explained = ConfigError(f"{advice}\ntorch said: {text.splitlines()[0]}")
            explained.__cause__ = error
            return explained
    return None
