"""Population based training with Ray Tune: bad trials continue a good one's checkpoint with another learning rate.

Run it with: python sweep_ray.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer import Callback, Trainer, TrainModule


class Report(Callback):
    """Gives Ray the values and a checkpoint after each epoch, and sets the trial's own learning rate.

    Args:
        lr: the learning rate of this trial, which Ray has changed if the trial continues from another one's checkpoint.
    """

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        # A resumed optimizer has the learning rate of the checkpoint.
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        from ray import tune

        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder) / "checkpoint")
            values = {name: float(value) for name, value in trainer.callback_metrics.items()}
            report = {"epoch": trainer.current_epoch, **values}
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))


def train(config: dict[str, Any]) -> None:
    """Train one trial, from the checkpoint that Ray gives it, if there is one."""
    sys.path.insert(0, config["examples"])
    from data import DigitsData
    from module import Digits
    from ray import tune

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=config["max_epochs"],
        callbacks=[Report(config["lr"])],
        default_root_dir=Path.cwd() / "runs",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        seed=1,
    )
    module, data, given = Digits(lr=config["lr"], lr_decay=1.0), DigitsData(), tune.get_checkpoint()
    if given is None:
        trainer.fit(module, datamodule=data)
    else:
        with given.as_directory() as folder:
            trainer.fit(module, datamodule=data, ckpt_path=Path(folder) / "checkpoint", allow_changes=["optimizers"])


def main() -> None:
    """Train a population, and print its best member."""
    import ray
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--population", type=int, default=4)
    parser.add_argument("--max-epochs", type=int, default=8)
    arguments = parser.parse_args()

    ray.init(num_cpus=2, include_dashboard=False)
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="val_acc",
        mode="max",
        perturbation_interval=2,
        hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-2)},
        quantile_fraction=0.5,
        synch=True,
    )
    # Half of the population learns far too slowly, and takes over from the others.
    rates = [3e-3 if number % 2 else 1e-7 for number in range(arguments.population)]
    space = {
        "lr": tune.grid_search(rates),
        "max_epochs": arguments.max_epochs,
        "examples": str(Path(__file__).resolve().parent),
    }
    results = tune.Tuner(
        train,
        param_space=space,
        tune_config=tune.TuneConfig(scheduler=scheduler),
        run_config=tune.RunConfig(storage_path=str(Path("runs/ray").absolute()), name="pbt", verbose=1),
    ).fit()
    for result in results:
        metrics = result.metrics or {}
        print(
            f"epoch {metrics.get('epoch')}, lr {(result.config or {})['lr']:.2e}: val_acc {metrics.get('val_acc'):.4f}"
        )
    best = results.get_best_result("val_acc", "max")
    print(f"best: val_acc {(best.metrics or {})['val_acc']:.4f}")
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    main()
