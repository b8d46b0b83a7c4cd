"""Time that averaged weights (EMA) add to a step of the `examples/gpt` model.

The Transformer of that example's configuration: 3 layers of width 96, contexts of 64 tokens, batches of 16, AdamW, one
thread; random tokens in memory, everything off. The run without an average stands for the hand-written loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks._ours import trainer
from benchmarks._report import Report
from benchmarks._task import OFF, Batches, Task
from benchmarks._turns import Clock, Contender, arguments_of, take_turns
from examples.gpt.model import Transformer
from trainer import TrainModule
from trainer.callbacks import Callback, EMAWeightAveraging, WeightAveraging

VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH, BATCH = 128, 64, 3, 4, 96, 16
BAR = 1.01
WHAT = (
    "CPU and wall time per step of a Transformer of {parameters:,} parameters on {tokens} tokens, AdamW, one thread. "
    "`above the loop` and the ratios compare a run that averages its weights after each step with one that does not."
)


class GPT(TrainModule):
    """Predicts each next token, and ticks the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.net = Transformer(VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH, dropout=0.0)
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.tick()
        return cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: list[str]) -> int:
    options = arguments_of("average", __doc__, 400, 9).parse_args(arguments)
    torch.set_num_threads(1)
    task = Task(options.steps)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    data: Any = Batches([tokens] * options.steps)

    def run(clock: Clock, folder: Path, *callbacks: Callback) -> None:
        trainer(task, folder, **OFF, callbacks=list(callbacks)).fit(GPT(clock), data)

    parameters = sum(parameter.numel() for parameter in GPT(Clock(1)).parameters())
    report = Report("average", WHAT.format(parameters=parameters, tokens=BATCH * CONTEXT))
    contenders = [
        Contender("ours, EMAWeightAveraging", lambda clock, folder: run(clock, folder, EMAWeightAveraging()), bar=BAR),
        Contender("ours, WeightAveraging", lambda clock, folder: run(clock, folder, WeightAveraging())),
    ]
    take_turns(report, Contender("without an average", run), contenders, options.steps, options.rounds, options.only)
    report.save(options.save)
    return 0
