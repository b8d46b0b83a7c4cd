"""Fit scvi's variational autoencoder to its own synthetic counts, and load it from its folder."""

import numpy as np
import scvi
from result import write

scvi.settings.seed = 1
np.random.seed(1)
counts = scvi.data.synthetic_iid(batch_size=64, n_genes=20)
scvi.model.SCVI.setup_anndata(counts, batch_key="batch")
model = scvi.model.SCVI(counts, n_hidden=16, n_latent=3, n_layers=1)
model.train(
    max_epochs=20,
    accelerator="cpu",
    enable_progress_bar=False,
    batch_size=32,
    check_val_every_n_epoch=1,
    early_stopping=True,
    train_size=0.75,
)
model.save("saved", overwrite=True)
loaded = scvi.model.SCVI.load("saved", adata=counts)
write(
    losses=model.history["train_loss"].to_numpy(),
    validated=model.history["elbo_validation"].to_numpy(),
    latent=np.linalg.norm(model.get_latent_representation()),
    same_latent=np.array_equal(model.get_latent_representation(), loaded.get_latent_representation()),
    weights=model.module,
    loaded=loaded.module,
)
