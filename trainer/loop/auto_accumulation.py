"""accumulate_grad_batches="auto": split batches that do not fit into the memory into windows of micro-batches."""

from __future__ import annotations

import logging
from itertools import islice

import torch

from trainer.data.loader import Batch, BatchLoader
from trainer.data.micro_batches import bytes_of, slice_samples
from trainer.data.sharded_loader import ShardedDataLoader
from trainer.errors import ConfigError
from trainer.loop.run import Run
from trainer.loop.step import checked_loss
from trainer.metrics.metric_log import MetricScope
from trainer.model.copies import deepcopy_with_functions
from trainer.model.memory_limit import is_out_of_memory, limited_memory, memory_of_trial, release_memory
from trainer.module import TrainModule

log = logging.getLogger("trainer")

FIRST_BATCHES = 16
"""Number of batches at the start of an epoch; the largest of them is tried."""
STATE_OF_ADAM = 2
"""Values for each parameter in the state of Adam, the largest state of a common optimizer."""


def split_batches(run: Run) -> None:
    """Split the training batches into micro-batches of the size that fits, once that is known.

    Raises:
        ConfigError: the batches cannot be split.
    """
    if run.settings.accumulate_grad_batches != "auto" or run.session.fitting_samples is None:
        return
    loader = _splittable(run.loaders.train)
    assert loader.batch_size is not None
    run.session.split_into(loader.split(_largest_divisor(loader.batch_size, run.session.fitting_samples)))


def find_fitting_batches(run: Run) -> None:
    """Try a forward and backward of the largest batch, and split batches if it does not fit on every process.

    Leaves weights, gradients, random numbers, samplers, and the module's buffers and attributes unchanged.
    Collective.

    Raises:
        ConfigError: not even one sample fits, or the batches cannot be split.
    """
    if run.settings.accumulate_grad_batches != "auto" or run.session.fitting_samples is not None:
        return
    loader = _splittable(run.loaders.train)
    with loader.kept_data():
        batches = list(islice(loader.iterate(run.progress.epoch), FIRST_BATCHES))
    largest = max(batches, key=lambda batch: bytes_of(batch.data))
    size = loader.batch_size
    assert size is not None
    while not all(run.strategy.processes.all_gather_object(_fits(run, largest, size))):
        if size == 1:
            raise ConfigError(
                "accumulate_grad_batches='auto': not even one sample fits into the memory. `trainer estimate` says "
                "what takes it; activation_checkpointing, bf16-mixed or strategy='fsdp' need less."
            )
        size = _largest_divisor(loader.batch_size or 1, size - 1)
    run.session.remember_fitting(size)
    split_batches(run)
    run.progress.split_batches(loader.parts)
    words = "accumulate_grad_batches='auto': micro-batches of %d of the %d samples of a batch fit"
    run.strategy.processes.log.info(words, size, size * loader.parts)


def _splittable(loader: BatchLoader | None) -> ShardedDataLoader:
    """Return the training loader; raise ConfigError if its batches cannot be split."""
    if not isinstance(loader, ShardedDataLoader) or loader.batch_size is None:
        raise ConfigError(
            "accumulate_grad_batches='auto' needs a DataLoader with a batch_size over a map-style dataset, to take a "
            "batch from for a trial: give a number instead."
        )
    return loader


def _largest_divisor(batch_size: int, limit: int) -> int:
    """Return the largest divisor of the batch size up to a limit, so that all parts are equal."""
    return next(size for size in range(min(batch_size, max(limit, 1)), 0, -1) if batch_size % size == 0)


def _fits(run: Run, batch: Batch, size: int) -> bool:
    """Whether two micro-batches of a window, and the optimizer's state, fit into the memory of this process."""
    samples = batch.samples or size
    data = slice_samples(batch.data, samples, 0, min(size, samples))
    parameters = [parameter for parameter in run.module.parameters() if parameter.requires_grad]
    try:
        # On a CPU no allocation fails in time.
        limit = memory_of_trial() if run.strategy.device.type == "cpu" else None
        with run.generators.isolated(), limited_memory(limit):
            module = _copy_sharing_weights(run.module)
            states = [torch.zeros_like(parameter) for parameter in parameters for _ in range(STATE_OF_ADAM)]
            for _ in range(2):
                _forward_and_backward(run, module, data)
            del module, states
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        del error
        return False
    finally:
        release_memory()


def _forward_and_backward(run: Run, module: TrainModule, data: object) -> None:
    strategy = run.strategy
    with run.metrics.recording(MetricScope(batches=False, steps=False)), strategy.gradient_sync(last=False):
        batch = run.transfer()(data)
        with strategy.precision.forward_context(strategy.device):
            outputs = module.training_step(batch, 0)
        if outputs is not None:
            checked_loss(outputs, module, False).backward()


def _copy_sharing_weights(module: TrainModule) -> TrainModule:
    """Return a copy of the module for a trial, which shares only the memory of its weights."""
    shared = {id(p): torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()}
    copied = deepcopy_with_functions(module, shared)
    copied.attach(module.trainer)
    return copied
