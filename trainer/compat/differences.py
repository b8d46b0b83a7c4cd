"""Names and settings of Lightning that mean something else here: the table of `docs/migrating.md`.

`python -m trainer.compat.differences` prints the table; the tests compare it with the page, and run scenarios through
both libraries, whose results are equal or explained by a row.
"""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """One row of the table."""

    name: str
    """The name by which the tests refer to it."""
    lightning: str
    here: str


DIFFERENCES = (
    Difference(
        "names",
        "`LightningModule`, `LightningDataModule`",
        "`TrainModule`, `DataModule`",
    ),
    Difference(
        "imports",
        "`import lightning as L`",
        "`from trainer import Trainer, TrainModule, Callback`",
    ),
    Difference(
        "steps of several optimizers",
        "`trainer.global_step` counts every optimizer's step",
        "one per step, however many optimizers; with manual optimization one per batch",
    ),
    Difference(
        "work per step",
        "`on_train_batch_end` for work per step",
        "also `on_train_step_end`: once per update",
    ),
    Difference(
        "overrides of the step",
        "`optimizer_step`, `backward`, `optimizer_zero_grad` overrides",
        "refused at the start, with an alternative",
    ),
    Difference(
        "ranks and folders",
        "`trainer.global_rank`, `trainer.log_dir`",
        "`trainer.rank` (or the same), `trainer.run_dir`; also `trainer.local_rank`, `world_size`, `is_global_zero`",
    ),
    Difference(
        "sampler",
        "`use_distributed_sampler`",
        "not needed: a plain DataLoader is split without repeating samples",
    ),
    Difference(
        "short window",
        "loss divided by `accumulate_grad_batches`, even in a short last window",
        "divided by the actual size of the window",
    ),
    Difference(
        "evaluation results",
        "`validate` returns a list of dicts",
        "one dict; several loaders by name",
    ),
    Difference(
        "several loaders",
        "`val_loss/dataloader_idx_0`",
        "`val_loss/name` (or its number), and `val_loss` over all loaders",
    ),
    Difference(
        "index of the loader",
        "with one loader a step that has `dataloader_idx` is refused, with several one that has not",
        "both run: the only loader has index 0",
    ),
    Difference(
        "skipped batch",
        "`training_step` returns None to skip a batch",
        "the same, and its items count nowhere; on several processes write `return None` in "
        "`training_step` itself, so that they know to agree; an error with sharded strategies on several "
        "processes",
    ),
    Difference(
        "rest of the epoch skipped",
        "`on_train_batch_start` returns -1: no validation at the end of that epoch",
        "the epoch ends on all processes as soon as one returns -1, and is validated as always",
    ),
    Difference(
        "gradients in training_step",
        "gradients are cleared between forward and backward, so `.grad` is there in `training_step`",
        "cleared before the step: no memory of the last step is held during a forward",
    ),
    Difference(
        "zero_grad",
        "`on_before_zero_grad` after the forward",
        "before the first micro-batch of the step",
    ),
    Difference(
        "zero_grad of a validation",
        "no `on_validation_model_zero_grad` in the sanity check",
        "there, too",
    ),
    Difference(
        "loss of outputs",
        '`outputs["loss"]` in `on_train_batch_end` is divided by `accumulate_grad_batches`',
        "as `training_step` returned it",
    ),
    Difference(
        "module after fit",
        "the module is on the CPU after `fit`",
        "on its device; `trainer.full_state_dict()` is on the CPU",
    ),
    Difference(
        "a second fit",
        "a second `fit` of the same Trainer goes on counting, and may have nothing left to do",
        "starts again at step and epoch 0, with the weights as they are; to go on, give `ckpt_path`; its "
        "run directory is a new one",
    ),
    Difference(
        "sync_dist",
        "`sync_dist=True`; without it a value is that of rank 0",
        "always reduced over processes, where it is logged, monitored or returned; `callback_metrics` "
        "has the process's own latest value by step",
    ),
    Difference(
        "value of a window",
        "the value of a step with accumulation is that of its last micro-batch",
        "in logs, and at the end of the epoch, the mean over them; before, `callback_metrics` has the last one",
    ),
    Difference(
        "validation inside a window",
        "`val_check_interval=3` with `accumulate_grad_batches=2` validates between the batches of a step",
        "at the end of that step",
    ),
    Difference(
        "step axis",
        "the first point by step is at step 49, with `log_every_n_steps=50`: the index of the step",
        "at step 50: the number of completed steps",
    ),
    Difference(
        "evaluation by step",
        "`self.log(..., on_step=True)` in `validation_step`: a point for each batch",
        "the steps are those of training: with `on_epoch=True` the names are Lightning's (`v_epoch`, and "
        "`v` for `monitor=`), with `on_step` alone a warning, and the mean",
    ),
    Difference(
        "sanity check",
        "values of the sanity check are in `callback_metrics` while it runs",
        "they are nowhere",
    ),
    Difference(
        "names of the trainer",
        '`self.log("step", ...)` sets the step axis of the loggers, `self.log("epoch", ...)` their epoch',
        "an error: both are the trainer's own",
    ),
    Difference(
        "hyperparameters and options",
        "hyperparameters and options of optimizers are what pickle can store",
        "data, numbers of numpy included; anything else is an error at the start",
    ),
    Difference(
        "arguments of self.log",
        "`self.log` of one name with other arguments raises",
        "the arguments of the first call in an epoch count",
    ),
    Difference(
        "callback_metrics",
        '`trainer.callback_metrics["x"] = ...`',
        "each access returns a new dict: use `self.log`",
    ),
    Difference(
        "metrics over loaders",
        "a torchmetrics object used for several validation loaders accumulates over all of them",
        "is reset after each loader; with one loader, after the epoch-end hooks",
    ),
    Difference(
        "log before training",
        "`prepare_data`, `setup`, `on_fit_start`: no logging",
        "what is logged in `setup` and `on_fit_start` belongs to the first epoch",
    ),
    Difference(
        "seeds of ranks",
        "ranks have the same random numbers at the start of `fit`",
        "each rank has its own, derived from the seed; the initial weights are equal",
    ),
    Difference(
        "order of samples",
        "DistributedSampler: every n-th sample, the last batches padded with repeated ones",
        "contiguous parts of the same global batch, no repeated sample; the last batch may have one "
        "sample on some process",
    ),
    Difference(
        "overfit_batches",
        "`overfit_batches` limits the validation loader",
        "validates on the same training batches",
    ),
    Difference(
        "reduce_fx",
        "`reduce_fx=torch.max`",
        '`reduce_fx="max"`: "mean", "sum", "min" or "max"',
    ),
    Difference(
        "predictions",
        "`predict` keeps all predictions",
        "streams them to callbacks; `return_predictions=True` keeps them",
    ),
    Difference(
        "checkpoint format",
        "`.ckpt` (pickle)",
        "a folder of safetensors and JSON",
    ),
    Difference(
        "newest checkpoint",
        "`ModelCheckpoint(save_last=None)`",
        "the newest is always kept",
    ),
    Difference(
        "score of a checkpoint",
        "`ModelCheckpoint` scores a checkpoint with the latest value",
        "only with one measured at its step; others are kept as the newest",
    ),
    Difference(
        "mode",
        '`ModelCheckpoint(monitor="val_acc")`, `EarlyStopping("val_acc")` mean "min"',
        'an error without `mode`; a name that says nothing means "min"',
    ),
    Difference(
        "unknown value in a filename",
        '`ModelCheckpoint(filename="{val_loss}")` before a value is known: 0',
        "nan",
    ),
    Difference(
        "save_top_k without monitor",
        "`save_top_k=3` without `monitor` is refused",
        "keeps the newest three",
    ),
    Difference(
        "NaN as a score",
        "NaN as a score counts as infinite",
        "is never the best",
    ),
    Difference(
        "value seen once",
        "EarlyStopping and ReduceLROnPlateau use the latest value again",
        "each value once: with `check_val_every_n_epoch=2`, every second epoch",
    ),
    Difference(
        "plateau in a checkpoint",
        "a checkpoint of an epoch's end misses ReduceLROnPlateau's step",
        "has it: it is written after the step",
    ),
    Difference(
        "stop inside an epoch",
        "a stop inside an epoch validates once more, and counts the epoch",
        "no validation; `on_train_epoch_end` is called, and again at the epoch's end when the run goes on",
    ),
    Difference(
        "schedule after validation",
        "schedulers step before the validation of an epoch's end",
        "after it: the validation belongs to the epoch whose learning rate it had",
    ),
    Difference(
        "frequency",
        'a scheduler with `interval="step"` and `frequency=3` starts counting anew in each epoch',
        "counts steps through the epochs",
    ),
    Difference(
        "accumulation schedule",
        "`accumulate_grad_batches=4` beside a `GradientAccumulationScheduler` is refused",
        "holds until the first epoch of the schedule, with a warning; refused if the schedule names epoch 0",
    ),
    Difference(
        "clipping by another value",
        "`self.clip_gradients` in `configure_gradient_clipping` with another value than `gradient_clip_val` is refused",
        "clips by the value it is given",
    ),
    Difference(
        "no optimizer",
        "`configure_optimizers` returns None: trains without an optimizer, with a warning",
        "an error, since a forgotten `return` looks the same; for a run without updates give `SGD(..., lr=0)`",
    ),
    Difference(
        "nothing to run",
        "`max_epochs=0`, or 0 for a limit of batches: none of the hooks around the missing batches",
        "those of the start and the end are called",
    ),
    Difference(
        "refused settings",
        "an unknown key in a scheduler's dict, an empty training loader, `overfit_batches` with "
        "`limit_train_batches`, `EarlyStopping(patience=0)`, `check_val_every_n_epoch=None`: a "
        "warning or nothing",
        "an error before the first step",
    ),
    Difference(
        "batch None",
        "a training batch that is None is skipped",
        "an error that names the loader and the batch, in every stage: processes that skip different batches "
        "would lose each other",
    ),
    Difference(
        "map_location",
        "`load_from_checkpoint` without `map_location`: the device of the training; functions and dicts see it",
        "the CPU: a checkpoint does not record its devices, and functions and dicts see `cpu`",
    ),
    Difference(
        "calls of log_metrics",
        "one call of `Logger.log_metrics` for an evaluation with several loaders",
        "one for each loader, and one for the values over all loaders",
    ),
    Difference(
        "teardown after an error",
        "`teardown` is not called after an error",
        "is called, also by the error of another callback",
    ),
    Difference(
        "hook after prediction",
        "`on_predict_model_train` is never called",
        "after the prediction, as its siblings of validation and test are",
    ),
    Difference(
        "time of the sanity check",
        '`Timer` counts the sanity check as "validate"',
        "does not",
    ),
    Difference(
        "max_time and Timer",
        "`Trainer(max_time=...)` is ignored beside a `Timer`",
        "both hold: the shorter time ends the run",
    ),
    Difference(
        "resume",
        "a mid-epoch resume repeats data",
        "resumes at the next batch",
    ),
    Difference(
        "hooks of a resume",
        "resuming at an epoch's end runs the sanity check, and inside an epoch no `on_train_epoch_start`",
        "no sanity check; `on_train_epoch_start` is called again, and what it logs or draws is dropped",
    ),
    Difference(
        "checkpoints of one name",
        "`{val/loss:.2f}` in a filename makes a folder; a name without a field and `save_top_k=-1` is written again",
        "the field is `val_loss=`; `-v1`, `-v2` are added",
    ),
    Difference(
        "Ctrl-C",
        "Ctrl-C exits with 1",
        "finishes the step, saves, exits with 130",
    ),
)


def table() -> str:
    """Return the Markdown table of `docs/migrating.md`."""
    rows = [f"| {row.lightning} | {row.here} |" for row in DIFFERENCES]
    return "\n".join(["| Lightning | here |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())
