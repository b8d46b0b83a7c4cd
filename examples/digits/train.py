"""The digits example from Python instead of a config file.

Run it with: python train.py
"""

from __future__ import annotations

import argparse

from data import DigitsData
from module import Digits

from trainer import Trainer
from trainer.callbacks import EarlyStopping, ModelCheckpoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--root", default="runs/digits", help="run directories are made here")
    options = parser.parse_args()

    # The trainer first: with `seed`, modules created after it have the same weights in every run.
    trainer = Trainer(
        max_epochs=options.max_epochs,
        devices=options.devices,
        default_root_dir=options.root,
        seed=42,
        log_every_n_steps=10,
        callbacks=[
            ModelCheckpoint(monitor="val_acc", mode="max", save_top_k=1),
            EarlyStopping(monitor="val_loss", mode="min", patience=5),
        ],
    )
    module = Digits(lr=3e-3)
    data = DigitsData(batch_size=64)
    trainer.fit(module, datamodule=data)

    # The best weights of the run, on images that were never used before.
    (results,) = trainer.test(module, datamodule=data, ckpt_path="best")
    trainer.print(f"test accuracy: {results['test_acc']:.4f}")
    trainer.print(f"run directory: {trainer.run_dir}")


if __name__ == "__main__":
    main()
