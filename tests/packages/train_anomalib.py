"""Find strange parts of a photograph of scikit-learn's with Padim and a normalizing flow, in anomalib's engine."""

from pathlib import Path

import lightning.pytorch as pl
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Fastflow, Padim
from PIL import Image
from result import weights, write
from sklearn.datasets import load_sample_images

SIZE = 64
house, flower = load_sample_images().images
for name, photograph, count in (("good", house, 16), ("bad", flower, 8)):
    Path("images", name).mkdir(parents=True)
    for number in range(count):
        top, left = SIZE * (number // 8) + 100, SIZE * (number % 8)
        part = photograph[top : top + SIZE, left : left + SIZE]
        Image.fromarray(part).save(Path("images", name, f"{number}.png"))
Path("images", "masks").mkdir()
for number in range(8):  # all of a flower is strange
    Image.new("L", (SIZE, SIZE), 255).save(Path("images", "masks", f"{number}.png"))


def trained(model, epochs):
    """Train a model, and return what it and its checkpoint have computed."""
    pl.seed_everything(1)
    data = Folder(
        name="house",
        root="images",
        normal_dir="good",
        abnormal_dir="bad",
        mask_dir="masks",
        train_batch_size=16,  # all of them: the batches are shuffled
        eval_batch_size=4,
        num_workers=0,
        seed=0,
    )
    engine = Engine(max_epochs=epochs, accelerator="cpu", devices=1, logger=False, default_root_dir="results")
    engine.fit(model=model, datamodule=data)
    after_fit = weights(model)
    tested = engine.test(model=model, datamodule=data)
    loaded = type(model).load_from_checkpoint(engine.trainer.checkpoint_callback.best_model_path, weights_only=False)
    predicted = engine.predict(model=loaded, datamodule=data)
    return {
        "weights": after_fit,
        "tested": tested,
        "loaded": loaded,
        "predicted": [batch.pred_score for batch in predicted],
    }


pl.seed_everything(1)
padim = Padim(backbone="resnet18", layers=["layer1"], pre_trained=False, n_features=10)
flow = Fastflow(backbone="resnet18", pre_trained=False, flow_steps=2)
write(padim=trained(padim, 1), flow=trained(flow, 2))
