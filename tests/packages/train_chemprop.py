"""Learn activities of ChEMBL's that RDKit carries with a message-passing network, and load it from its checkpoint."""

import csv
from pathlib import Path

import numpy as np
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from rdkit import RDConfig
from result import write

folder = Path(RDConfig.RDContribDir) / "FreeWilson" / "data"
with open(folder / "CHEMBL2321810.smi") as lines:
    smiles = {name: text for text, name in (line.split() for line in lines)}
with open(folder / "CHEMBL2321810_act.csv") as lines:
    activities = [(row[0], float(row[-1])) for row in list(csv.reader(lines))[1:]]
points = [data.MoleculeDatapoint.from_smi(smiles[name], np.array([value])) for name, value in activities]


class Losses(pl.Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        """Note it."""
        self.steps.append(float(outputs["loss"]))


pl.seed_everything(1)
graphs = featurizers.SimpleMoleculeMolGraphFeaturizer()
train = data.MoleculeDataset(points[:48], graphs)
scaler = train.normalize_targets()
validation = data.MoleculeDataset(points[48:64], graphs)
validation.normalize_targets(scaler)
test = data.MoleculeDataset(points[64:80], graphs)
batches, validated, tested = (
    data.build_dataloader(part, batch_size=16, num_workers=0, shuffle=False) for part in (train, validation, test)
)
network = models.MPNN(
    nn.BondMessagePassing(d_h=16),
    nn.MeanAggregation(),
    nn.RegressionFFN(input_dim=16, hidden_dim=8, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)),
    batch_norm=True,
    metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
)
losses = Losses()
best = ModelCheckpoint("checkpoints", "best-{epoch}-{val_loss:.2f}", "val_loss", mode="min", save_last=True)
trainer = pl.Trainer(
    logger=False,
    enable_checkpointing=True,
    enable_progress_bar=False,
    accelerator="cpu",
    devices=1,
    max_epochs=4,
    callbacks=[best, losses],
)
trainer.fit(network, batches, validated)
metrics = dict(trainer.callback_metrics)
results = trainer.test(dataloaders=tested, weights_only=False)
models.save_model("saved.pt", network)
loaded = models.MPNN.load_from_file(best.best_model_path)
write(
    losses=losses.steps,
    metrics=metrics,
    weights=network,
    tested=results,
    predicted=trainer.predict(network, tested),
    loaded=loaded,
    predicted_by_loaded=trainer.predict(loaded, tested),
    saved=models.load_model("saved.pt"),
)
