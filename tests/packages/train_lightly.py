"""Learn scikit-learn's digits without labels by lightly's SimCLR, and evaluate with its classifiers."""

import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.utils.benchmarking import KNNClassifier, LinearClassifier, MetricCallback, OnlineLinearClassifier
from result import write
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SimCLR(pl.LightningModule):
    """Two views of a digit: as it is, and darker."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.head = SimCLRProjectionHead(32, 16, 8)
        self.criterion = NTXentLoss()
        self.online = OnlineLinearClassifier(feature_dim=32, num_classes=10)

    def forward(self, images):
        return self.backbone(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        features = self.backbone(images)
        loss = self.criterion(self.head(features), self.head(self.backbone(0.9 * images)))
        self.log("train_loss", loss, on_epoch=True)
        online_loss, values = self.online.training_step((features.detach(), labels), batch_idx)
        self.log_dict(values, sync_dist=True, batch_size=len(labels))
        return loss + online_loss

    def validation_step(self, batch, batch_idx):
        loss, values = self.online.validation_step((self.backbone(batch[0]), batch[1]), batch_idx)
        self.log_dict(values, prog_bar=True, batch_size=len(batch[1]))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def trainer(*callbacks):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=list(callbacks), **quiet)


pl.seed_everything(1)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train = DataLoader(TensorDataset(images[:256], labels[:256]), batch_size=64)
validation = DataLoader(TensorDataset(images[256:384], labels[256:384]), batch_size=64)
model, values = SimCLR(), MetricCallback()
fitted = trainer(values)
fitted.fit(model, train, validation)
fitted.save_checkpoint("simclr.ckpt")
loaded = SimCLR.load_from_checkpoint("simclr.ckpt")
neighbours = KNNClassifier(loaded, num_classes=10, knn_k=5, knn_t=0.1, train_dataloader_idx=0, val_dataloader_idx=1)
nearest = trainer().validate(neighbours, [train, validation])
pl.seed_everything(2)
linear, linear_values = LinearClassifier(loaded, 64, feature_dim=32, num_classes=10), MetricCallback()
trainer(linear_values).fit(linear, train, validation)
write(
    metrics=[values.train_metrics, values.val_metrics],
    weights=model,
    loaded=loaded,
    nearest=nearest,
    linear=linear,
    linear_metrics=[linear_values.train_metrics, linear_values.val_metrics],
)
