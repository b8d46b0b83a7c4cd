"""Classify scikit-learn's digits by torch-uncertainty's routine, with its metrics of calibration."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from result import write
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine

pl.seed_everything(1)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train = DataLoader(TensorDataset(images[:320], labels[:320]), batch_size=32)
validation = DataLoader(TensorDataset(images[320:480], labels[320:480]), batch_size=32)
network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
recipe = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
routine = ClassificationRoutine(network, num_classes=10, loss=nn.CrossEntropyLoss(), optim_recipe=recipe)
best = ModelCheckpoint(dirpath="checkpoints", monitor="val/cls/Acc", mode="max")
trainer = pl.Trainer(max_epochs=3, accelerator="cpu", enable_progress_bar=False, logger=False, callbacks=[best])
trainer.fit(routine, train, validation)
metrics = dict(trainer.callback_metrics)
write(metrics=metrics, weights=routine, tested=trainer.test(routine, validation, ckpt_path="best"))
