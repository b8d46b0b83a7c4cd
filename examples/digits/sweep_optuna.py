"""A sweep with Optuna: each trial trains the digits, and trials worse than the others end early.

Run it with: python sweep_optuna.py --trials 10
"""

from __future__ import annotations

import argparse
from typing import Any

import optuna
from data import DigitsData
from module import Digits

from trainer import Callback, Trainer, TrainModule


class Pruning(Callback):
    """Reports a value to Optuna after each validation, and ends the training when Optuna prunes the trial.

    `trainer.stop` ends it after a complete step, with the last checkpoint written. On several processes rank 0 reports,
    and all of them stop at the same step.
    """

    def __init__(self, trial: optuna.Trial, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor
        self.pruned = False

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        self.trial.report(float(trainer.callback_metrics[self.monitor]), step=trainer.current_epoch)
        if self.trial.should_prune():
            self.pruned = True
            trainer.stop(f"Optuna pruned trial {self.trial.number}")


def main() -> None:
    """Search for a learning rate and a dropout, and print the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--max-epochs", type=int, default=6)
    parser.add_argument("--storage", help="such as sqlite:///sweep.db: several processes may work on one sweep")
    parser.add_argument("--seed", type=int, default=1, help="of the search: give each process of a sweep another one")
    arguments = parser.parse_args()

    def objective(trial: optuna.Trial) -> float:
        values: dict[str, Any] = {
            "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            "dropout": trial.suggest_float("dropout", 0.0, 0.5),
        }
        pruning = Pruning(trial, "val_acc")
        trainer = Trainer(
            max_epochs=arguments.max_epochs,
            callbacks=[pruning],
            default_root_dir=f"runs/optuna/trial-{trial.number}",
            enable_progress_bar=False,
            enable_model_summary=False,
            seed=1,
        )
        trainer.fit(Digits(**values), datamodule=DigitsData())
        if pruning.pruned:
            raise optuna.TrialPruned
        return float(trainer.callback_metrics["val_acc"])

    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    study = optuna.create_study(
        direction="maximize",
        pruner=pruner,
        sampler=optuna.samplers.TPESampler(seed=arguments.seed),
        storage=arguments.storage,
        study_name="digits",
        load_if_exists=True,
    )
    study.optimize(objective, n_trials=arguments.trials)
    states = [trial.state.name for trial in study.trials]
    print(f"{states.count('COMPLETE')} trials complete, {states.count('PRUNED')} pruned")
    print(f"best: val_acc {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
