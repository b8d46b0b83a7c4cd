"""Classify the breast cancer data of scikit-learn with embeddings of categories, and with a model that was saved."""

import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
from result import write
from sklearn.datasets import load_breast_cancer

data = load_breast_cancer(as_frame=True).frame
numbers = list(data.columns[:8])
data = data[[*numbers, "target"]].assign(size=pd.cut(data["mean area"], 4, labels=list("abcd")).astype(str))
# As many rows as whole batches: the last one is otherwise left out or not, by the order in which it is shuffled.
train, validation, test = data[:320], data[320:440], data[440:]
model = TabularModel(
    data_config=DataConfig(target=["target"], continuous_cols=numbers, categorical_cols=["size"], num_workers=0),
    model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8", dropout=0.0),
    optimizer_config=OptimizerConfig(lr_scheduler="ReduceLROnPlateau", lr_scheduler_params={"patience": 1}),
    trainer_config=TrainerConfig(
        batch_size=320, max_epochs=6, accelerator="cpu", progress_bar="none", checkpoints_path="checkpoints"
    ),
    verbose=False,
)
model.fit(train=train, validation=validation)
trainer = model.trainer
predicted = model.predict(test)
tested = model.evaluate(test, verbose=False)
model.save_model("saved")
loaded = TabularModel.load_model("saved")
write(
    metrics=trainer.callback_metrics,
    weights=model.model,
    tested=tested,
    predicted=predicted.filter(like="probability").to_numpy(),
    loaded=loaded.predict(test).filter(like="probability").to_numpy(),
    weights_loaded=loaded.model,
)
