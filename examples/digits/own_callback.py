"""Two custom callbacks, and a run that is stopped and resumed.

Run it with: python own_callback.py
"""

from __future__ import annotations

import argparse
from typing import Any

from data import DigitsData
from module import Digits

from trainer import Callback, Trainer, TrainModule


class StopWhenGood(Callback):
    """Ends training as soon as enough validation images are right.

    A callback is a class with a method for each hook that it uses, here one. The top of
    `trainer/callback.py` lists every hook in running order; a misspelt hook is an error.
    """

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        # All logged values, reduced over all processes: reading them here costs nothing.
        if not trainer.sanity_checking and trainer.callback_metrics["val_acc"] >= self.accuracy:
            trainer.stop(f"val_acc reached {self.accuracy}")


class History(Callback):
    """Remembers the validation accuracy after each epoch, across restarts.

    The state that `state_dict` returns (numbers, strings, lists, dicts, tensors) is part of every checkpoint;
    `load_state_dict` gets it when a run is resumed.
    """

    def __init__(self) -> None:
        self.accuracies: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self.accuracies.append(float(trainer.callback_metrics["val_acc"]))

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        for epoch, accuracy in enumerate(self.accuracies):
            trainer.print(f"  epoch {epoch}: val_acc {accuracy:.4f}")

    def state_dict(self) -> dict[str, Any]:
        return {"accuracies": self.accuracies}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.accuracies = state_dict["accuracies"]


def train(max_epochs: int, root: str) -> Trainer:
    """Train up to `max_epochs` epochs; a second call resumes the first, as a restarted job would."""
    trainer = Trainer(
        max_epochs=max_epochs,
        default_root_dir=root,
        seed=42,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StopWhenGood(accuracy=0.98), History()],
    )
    trainer.fit(Digits(), datamodule=DigitsData(), ckpt_path="last")
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/own_callback", help="run directories are made here")
    options = parser.parse_args()

    print("Two epochs:")
    train(max_epochs=2, root=options.root)

    print("The same run, resumed, up to ten epochs:")
    trainer = train(max_epochs=10, root=options.root)
    print(f"Stopped after {trainer.global_step} steps: {trainer.stop_reason}")


if __name__ == "__main__":
    main()
