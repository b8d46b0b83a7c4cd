"""Names and settings of Lightning with another meaning here: the table of `docs/migrating.md`.

`python -m trainer.compat.differences` prints the table; the tests compare it with the page, and run scenarios through
both libraries, whose results are equal or explained by a row.
"""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """One row of the table."""

    name: str
    """The name by which tests refer to the row."""
    lightning: str
    here: str


_NAMES = (
    Difference(
        "imports",
        "`import lightning as L`, `from lightning.pytorch.loggers import CSVLogger`",
        "`import trainer as L`, `from trainer.loggers import CSVLogger`: Lightning's paths and names are served, "
        "see [Lightning's names](lightning-names.md)",
    ),
    Difference(
        "ranks and folders",
        "`trainer.global_rank`, `trainer.log_dir`",
        "`trainer.rank` (or the same), `trainer.run_dir`; also `trainer.local_rank`, `world_size`, `is_global_zero`",
    ),
    Difference(
        "overrides of the step",
        "`optimizer_step(..., optimizer_closure)`: the closure runs `training_step` and backward",
        "forward and backward have run, and the closure returns their loss; an override that does not step keeps "
        "the gradients until the next step. Refused under DeepSpeed and XLA, and with LBFGS",
    ),
    Difference(
        "hyperparameters and options",
        "hyperparameters and options of optimizers are what pickle can store",
        "data, also of numpy, paths, enumerations, dataclasses and configurations: [which](#hyperparameters); "
        "`save_hyperparameters()` keeps other values in `hparams` only, with a warning; one that is asked for by name, "
        "or in an optimizer's options, is an error",
    ),
    Difference(
        "refused settings",
        "an unknown key in a scheduler's dict, an empty training loader, `overfit_batches` with "
        "`limit_train_batches`, `EarlyStopping(patience=0)`, `check_val_every_n_epoch=None` without a number of "
        "batches or a time in `val_check_interval`, `configure_callbacks` without a `return`, `min_steps` above "
        "`max_steps` or `min_epochs` above `max_epochs`, also with `fast_dev_run`: a warning or nothing",
        "an error before the first step",
    ),
    Difference(
        "stage of setup",
        "`setup` and `teardown` get `TrainerFn.FITTING` and the like",
        '"fit" and the like, which are equal to these',
    ),
    Difference(
        "limits of the trainer",
        "`trainer.num_sanity_val_steps` is infinite for -1, and 0 with `fast_dev_run`; `trainer.limit_train_batches` "
        "and the like are n with `fast_dev_run=n`",
        "they are what the Trainer was given; `trainer.num_training_batches`, `num_val_batches` and the like are the "
        "batches that are run",
    ),
    Difference(
        "no optimizer",
        "`configure_optimizers` returns None: trains without an optimizer, with a warning",
        "an error, since a forgotten `return` looks the same; for a run without updates give `SGD(..., lr=0)`",
    ),
)

_STEPS = (
    Difference(
        "steps of several optimizers",
        "`trainer.global_step` counts every optimizer's step",
        "one per step, however many optimizers; with manual optimization one per batch",
    ),
    Difference("work per step", "`on_train_batch_end` for work per step", "also `on_train_step_end`: once per update"),
    Difference(
        "short window",
        "loss divided by `accumulate_grad_batches`, even in a short last window or with a short last batch",
        "divided by the actual size of the window, in which micro-batches of unequal sizes, also of several processes, "
        "count by their samples",
    ),
    Difference(
        "accumulation schedule",
        "`accumulate_grad_batches=4` together with a `GradientAccumulationScheduler` is refused",
        "applies until the first epoch of the schedule, with a warning; refused if the schedule names epoch 0",
    ),
    Difference(
        "skipped batch",
        "`training_step` returns None to skip a batch",
        "the same, and its items are not counted; on several processes write `return None` in the body of "
        "`training_step`, where the trainer looks for it; an error under sharded strategies on several processes; a "
        "step all of whose batches are skipped does not call `on_before_optimizer_step`",
    ),
    Difference(
        "rest of the epoch skipped",
        "`on_train_batch_start` returns -1: no validation at the end of that epoch",
        "the epoch ends on all processes as soon as one returns -1, and is validated as always; that batch does not "
        "count",
    ),
    Difference(
        "gradients in training_step",
        "gradients are cleared between forward and backward, so `training_step` sees the last `.grad`",
        "cleared before the step, so that they take no memory during the forward",
    ),
    Difference("zero_grad", "`on_before_zero_grad` after the forward", "before the first micro-batch of the step"),
    Difference(
        "zero_grad of a validation",
        "`on_validation_model_zero_grad` is not called in the sanity check; elsewhere it clears the gradients, also "
        "those of an unfinished manual accumulation",
        "is called there, too; by default it clears nothing, so an accumulation continues after the validation",
    ),
    Difference(
        "loss of outputs",
        '`outputs["loss"]` in `on_train_batch_end` is divided by `accumulate_grad_batches`',
        "as `training_step` returned it",
    ),
    Difference(
        "graph of outputs",
        "`outputs` in `on_train_batch_end`: tensors other than the loss keep their graph",
        "all are detached, so that the step's memory is free",
    ),
    Difference(
        "algorithm of clipping",
        "`configure_gradient_clipping` gets `gradient_clip_algorithm=None` if the Trainer was not given one",
        '"norm", which None means',
    ),
    Difference(
        "clipping by another value",
        "`self.clip_gradients` in `configure_gradient_clipping` with another value than `gradient_clip_val` is refused",
        "clips by the value it is given",
    ),
    Difference(
        "validation inside a window",
        "`val_check_interval=3` with `accumulate_grad_batches=2` validates between the batches of a step",
        "at the end of that step",
    ),
    Difference(
        "schedule after validation",
        "schedulers step before the validation of an epoch's end",
        "after it, so the validation sees the learning rate of its epoch",
    ),
    Difference(
        "frequency",
        'a scheduler with `interval="step"` and `frequency=3` counts batches, also with accumulation, and anew in each '
        "epoch",
        "counts steps, across epochs",
    ),
    Difference(
        "stop inside an epoch",
        "a stop inside an epoch validates once more, and counts the epoch",
        "no validation; `on_train_epoch_end` is called, and called again at the end of the epoch if the run is resumed",
    ),
    Difference(
        "nothing to run",
        "`max_epochs=0`, 0 for a limit of batches, or a stop before training begins: the hooks around the missing "
        "batches are not called",
        "the hooks of the start and the end are called",
    ),
    Difference(
        "is_last_batch",
        "`trainer.is_last_batch` stays True after an epoch, until the next batch",
        "is False when the next epoch begins, and after `fit`",
    ),
    Difference(
        "set_epoch of a batch sampler",
        "`set_epoch` of a batch sampler is not called, only that of the sampler in it",
        "is called at the start of each epoch, as the sampler's",
    ),
    Difference(
        "random numbers after load_from_checkpoint",
        "`load_from_checkpoint` draws the random numbers of the module's initial weights from the global generators",
        "the generators are as before",
    ),
    Difference(
        "data without a length",
        "a loader without a length is read one batch ahead, and `trainer.is_last_batch` is True in its last step",
        "each batch is read when it is due, so that data made with the weights are made with those of now; "
        "`trainer.is_last_batch` stays False, and a checkpoint by step or time at an epoch's last step, with a "
        "`monitor` or a metric in its `filename`, is written again at the epoch's end",
    ),
    Difference(
        "a second fit",
        "a second `fit` of the same Trainer continues to count, and may have nothing left to do",
        "starts at step and epoch 0 in a new run directory, with the weights as they are; to continue, give "
        "`ckpt_path`",
    ),
    Difference(
        "a finished run",
        "`fit` from a checkpoint after which nothing is left to train calls only `on_fit_start` and `on_fit_end`",
        "also `on_train_start` and `on_train_end`; and in the middle of an epoch, at `max_steps`, the hooks of its "
        "start and end and the validation that was due, because the process may have ended before them",
    ),
    Difference(
        "seeds of ranks",
        "ranks have the same random numbers at the start of `fit`",
        "each rank has its own, derived from the seed; the initial weights are equal",
    ),
    Difference(
        "numbers drawn by loaders",
        "each pass over a DataLoader begins with a draw from torch's global generator, so that dropout depends on how "
        "many validations there were",
        "loaders leave the global generators alone",
    ),
    Difference(
        "module after fit",
        "the module is on the CPU after `fit`",
        "on its device; `trainer.full_state_dict()` is on the CPU",
    ),
    Difference(
        "hook after prediction",
        "`on_predict_model_train` is never called",
        "is called after the prediction, like `on_validation_model_train` and `on_test_model_train`",
    ),
    Difference(
        "teardown after an error",
        "`teardown` is not called after an error",
        "is called, even if that of another callback raises",
    ),
    Difference("Ctrl-C", "Ctrl-C exits with 1", "finishes the step, saves, exits with 130"),
    Difference(
        "what stays in float32",
        '`precision="bf16-true"` and `"16-true"` round all tensors: tables of positions, queues, states of metrics, '
        "statistics of BatchNorm",
        "round the weights only; a table that meets them in an expression is cast there: `self.table.to(x.dtype)`",
    ),
    Difference(
        "suggested learning rate",
        "`lr_find` suggests the steepest point of one curve, for noisy batches of 8 one of the first: 1e-7",
        "a rate that trainings of a few steps have confirmed, or None: no descent was seen. It takes about five times "
        "as many steps",
    ),
)

_LOGGING = (
    Difference(
        "several loaders",
        "`callback_metrics` has `val_loss/dataloader_idx_0` and so on",
        "also `val_loss`, over all loaders; loaders in a dict have `val_loss/name`",
    ),
    Difference(
        "sync_dist",
        "`sync_dist=True`; without it a value is that of rank 0",
        "always reduced over processes, where it is logged, monitored or returned; `callback_metrics` "
        "has the process's own latest value by step",
    ),
    Difference(
        "reduce_fx",
        "`reduce_fx` may be any function",
        "the functions and names of mean, sum, min and max",
    ),
    Difference(
        "samples of a batch",
        "means are weighted by the first dimension of a batch's first tensor",
        "by the number of samples that the DataLoader put into the batch; by that dimension if the number is not "
        "known. Samples that `collate_fn` left out do not count on one process and in evaluation, if rows of the batch "
        "are of a sample's shape, or the dataset returned None for them; else they count, with a warning, as in "
        "training on several processes. By the module's `num_items`, if it has that",
    ),
    Difference(
        "value of a window",
        "the value of a step with accumulation is that of its last micro-batch",
        "the mean over its micro-batches, in logs and at the end of the epoch; until then `callback_metrics` has the "
        "last one; likewise for a name logged twice in a step",
    ),
    Difference(
        "step axis",
        "with `log_every_n_steps=50` the first point is at step 49: the index of the step",
        "at step 50: the number of completed steps",
    ),
    Difference(
        "rates by epoch",
        '`LearningRateMonitor(logging_interval="epoch")` logs the rate of an epoch at its first step; '
        "`LearningRateMonitor()` logs a rate without a schedule twice there",
        "the same rate, with the other values of the epoch at its last step; once",
    ),
    Difference(
        "value logged in some steps",
        "the value of a step goes to the loggers again at each flush, until the name is logged again",
        "once, at the flush after its step",
    ),
    Difference(
        "log at a stop",
        "once a stop is asked for, every step is logged: the last one, and all while `min_epochs` or `min_steps` holds "
        "the stop back",
        "every `log_every_n_steps` steps, as before",
    ),
    Difference(
        "evaluation by step",
        "`self.log(..., on_step=True)` in `validation_step`: a point for each batch",
        "only the mean is logged, because steps are those of training; with `on_epoch=True` under Lightning's names "
        "(`v_epoch`, and `v` for `monitor=`), with `on_step` alone with a warning",
    ),
    Difference(
        "one name in two hooks",
        "one name logged in two hooks: two means, and the later one counts",
        "one mean over all values; a value logged at an epoch's end replaces the mean, and both go to the loggers",
    ),
    Difference(
        "arguments of self.log",
        "`self.log` of one name with other arguments raises",
        "uses the arguments of the first call in an epoch",
    ),
    Difference(
        "names of the trainer",
        '`self.log("step", ...)` sets the step axis of the loggers, `self.log("epoch", ...)` their epoch',
        "an error: both are the trainer's own",
    ),
    Difference(
        "log before training",
        "`self.log` raises in `prepare_data`, `setup`, `configure_optimizers`, `on_fit_start`, `on_train_end`, "
        "`on_fit_end`, `on_validation_end`, `lr_scheduler_step`, and with `on_step=True` at the start or end of an "
        "epoch",
        "works everywhere during a run except in `teardown`; a value logged before training belongs to the first "
        "epoch, and one logged with `on_step=True` at the start or end of an epoch to that epoch",
    ),
    Difference(
        "value of an epoch's start",
        "a value logged in `on_train_epoch_start` is in `callback_metrics` at once",
        "from the end of the epoch, as all values by epoch",
    ),
    Difference(
        "callback_metrics", '`trainer.callback_metrics["x"] = ...`', "each access returns a new dict: use `self.log`"
    ),
    Difference(
        "metrics over loaders",
        "a torchmetrics object used for several validation loaders accumulates over all of them",
        "is reset after each loader; with one loader, after the epoch-end hooks",
    ),
    Difference(
        "metric without a value of the batch",
        "a torchmetrics object logged with `on_step=True` that has no value of the batch, because its `update` was "
        "called or it is a wrapper such as `Running`: nothing by step",
        "an error, unless `on_step` is the default: call the metric, or log what the call returns",
    ),
    Difference(
        "folder of a logger",
        '`CSVLogger("logs")`, `TensorBoardLogger("logs")` write into `logs/lightning_logs/version_0`',
        "into `logs`, or `logs/version_1` where an earlier run has left files; with `name=` into "
        "`logs/name/version_n`, where n is the number of the run directory if it is free; `logger.log_dir` is the "
        "folder",
    ),
    Difference(
        "values of a bar",
        "`get_metrics` of a progress bar has `v_num`, the number of the logger's version",
        'has not: leave it out by `pop("v_num", None)`',
    ),
    Difference(
        "calls of log_metrics",
        "one call of `Logger.log_metrics` for an evaluation with several loaders",
        "one for each loader, and one for the values over all loaders",
    ),
)

_DATA = (
    Difference(
        "sampler",
        "`use_distributed_sampler=True` replaces the sampler",
        "a plain DataLoader is split without repeating samples; `False`: each process gets what its own sampler gives",
    ),
    Difference(
        "order of samples",
        "DistributedSampler: every n-th sample, the last batches padded with repeated ones",
        "contiguous parts of the same global batch, no repeated sample; the last batch may have one "
        "sample on some process",
    ),
    Difference(
        "data in order on several processes",
        "on several processes the training data of a plain DataLoader are shuffled, also with `shuffle=False`",
        "they come in order, as on one process, which the start of the run says; to shuffle them, give `shuffle=True`",
    ),
    Difference(
        "order of shuffling",
        "`shuffle=True` and random samplers draw the order from torch's global generator, or from a `generator` of "
        "their own",
        "the order follows from `Trainer(seed=)` or `seed_everything`, and the epoch, so that a resumed run has the "
        "same; a `generator` of a loader or sampler is seeded anew for each epoch",
    ),
    Difference(
        "overfit_batches",
        "`overfit_batches` limits the validation loader, if there is one",
        "validates on the same training batches",
    ),
    Difference(
        "order of the loaders",
        "for the sanity check the validation loader is asked for before the training loader, and "
        "`trainer.num_training_batches` is infinite in it",
        "the training loader is asked for first, and its length is known",
    ),
    Difference(
        "length of a loader",
        "a loader that gives fewer batches than its `__len__` ends the epoch early, one that gives more is cut off",
        "both are errors that name the loader; to end epochs early, set `limit_train_batches` and the like",
    ),
    Difference(
        "batch None",
        "a training batch that is None is skipped",
        "an error that names the loader and the batch, in every stage: processes that skip different batches "
        "would wait for each other for ever",
    ),
    Difference(
        "index of the loader",
        "a step with the argument `dataloader_idx` is refused with one loader, and one without it with several",
        "both run: the only loader has index 0",
    ),
    Difference(
        "predictions",
        "`predict` keeps all predictions",
        "unless a PredictionWriter takes them, or `return_predictions=False`",
    ),
)

_CHECKPOINTS = (
    Difference("checkpoint format", "`.ckpt` (pickle)", "a folder of safetensors and JSON"),
    Difference(
        "newest checkpoint",
        "`ModelCheckpoint(save_last=None)`: no `last`, and none is written when training ends",
        "the newest is always kept, unless `save_last=False`; one is written when training ends or is stopped; "
        "`last_model_path` is the newest in either case",
    ),
    Difference(
        "copy of the newest checkpoint",
        "`ModelCheckpoint(save_last=True)` writes the newest checkpoint twice, and calls `on_save_checkpoint` "
        "each time",
        'once, as with `save_last="link"`: `last` is a pointer',
    ),
    Difference(
        "rehearsal of a checkpoint",
        "calls `state_dict` and `on_save_checkpoint` when a checkpoint is written",
        "also before the first step, to find what cannot be stored; what they raise then ends nothing",
    ),
    Difference(
        "epochs without a validation",
        "`ModelCheckpoint` saves at validations only, unless `val_check_interval` and `check_val_every_n_epoch` are 1, "
        "so never where validations are left out",
        "also at the end of each epoch; with `save_on_train_epoch_end=False` at validations only",
    ),
    Difference(
        "score of a checkpoint",
        "`ModelCheckpoint` scores a checkpoint with the latest value",
        "only with one measured at its step; others are kept as the newest",
    ),
    Difference(
        "equal values",
        "of checkpoints that are equally bad, the oldest makes way for a better one",
        "the newest does: ties keep the older",
    ),
    Difference(
        "mode",
        '`ModelCheckpoint(monitor="val_acc")`, `EarlyStopping("val_acc")` mean "min"',
        'an error without `mode`; if the name does not say the direction, "min"',
    ),
    Difference("NaN as a score", "NaN as a score counts as infinite", "is never the best"),
    Difference("save_top_k without monitor", "`save_top_k=3` without `monitor` is refused", "keeps the newest three"),
    Difference(
        "unknown value in a filename", '`ModelCheckpoint(filename="{val_loss}")` before a value is known: 0', "nan"
    ),
    Difference(
        "checkpoints of one name",
        "a `/` in `filename`, also of `{val/loss:.2f}`, makes a folder; with `save_top_k=-1` and a `filename` without "
        "fields the same checkpoint is written again",
        "`/` becomes `_`, so that the field is `val_loss=`; further checkpoints get `-v1`, `-v2`",
    ),
    Difference(
        "plateau in a checkpoint",
        "a checkpoint at the end of an epoch is written before ReduceLROnPlateau's step",
        "after it",
    ),
    Difference("resume", "a mid-epoch resume repeats data", "resumes at the next batch"),
    Difference(
        "hooks of a resume",
        "resuming at the end of an epoch runs the sanity check; resuming inside an epoch does not call "
        "`on_train_epoch_start`",
        "no sanity check; `on_train_epoch_start` is called again, but what it logs, draws, and changes of weights, "
        "buffers, optimizers and callbacks' states does not count twice",
    ),
    Difference(
        "evaluated checkpoint",
        '`validate(ckpt_path="best")` after `fit` leaves `global_step` and `current_epoch` as they are',
        "they become those of the checkpoint, and so do the steps of the values that the evaluation logs",
    ),
    Difference(
        "map_location",
        "`load_from_checkpoint` without `map_location` uses the device of the training; functions and dicts get it",
        "uses the CPU: a checkpoint does not record its devices, and functions and dicts get `cpu`",
    ),
    Difference(
        "value seen once",
        "EarlyStopping and ReduceLROnPlateau use the latest value again",
        "each value once: with `check_val_every_n_epoch=2`, every second epoch",
    ),
    Difference(
        "name of both",
        "a name logged in training and in validation, and monitored: the latest value, so with "
        "`val_check_interval=1.0` the mean of the training epoch if it is logged by epoch",
        "the value of the validation, with a warning",
    ),
    Difference(
        "time of early stopping",
        "EarlyStopping checks after validations unless `val_check_interval` and `check_val_every_n_epoch` are 1, so "
        "never with `limit_val_batches=0`",
        "when the value is measured: after a validation, or after the training epoch",
    ),
    Difference(
        "average before its first update",
        "`EMAWeightAveraging(update_starting_at_step=100)`: until then, validations use the weights that `fit` began "
        "with",
        "the weights as they are",
    ),
    Difference(
        "average by epoch",
        "an average that is updated at the ends of epochs (`update_starting_at_epoch`) is updated after the epoch's "
        "validation: a checkpoint has the value of the average before its own",
        "before that validation; after it for data without a length, whose values then choose no checkpoint",
    ),
    Difference(
        "integers of an average",
        "`WeightAveraging` averages integer buffers, such as `num_batches_tracked`, too",
        "copies them from the training",
    ),
    Difference(
        "statistics of an average",
        "`StochasticWeightAveraging` with BatchNorms has one more epoch for their statistics, with hooks, logged "
        "values and a validation",
        "a pass over the training data at the end of the training, which calls `training_step` only",
    ),
    Difference(
        "max_time and Timer",
        "`Trainer(max_time=...)` is ignored with a `Timer`",
        "both hold: the shorter time ends the run",
    ),
    Difference("time of the sanity check", '`Timer` counts the sanity check as "validate"', "does not"),
    Difference(
        "states after the sanity check",
        "states of callbacks and of the data module keep what the sanity check has changed",
        "are put back after it",
    ),
    Difference(
        "saved in a validation",
        "`trainer.save_checkpoint` in a hook of a validation writes at once",
        "but for `on_validation_end`, when the validation has ended: the resumed run does not repeat it",
    ),
)

SECTIONS = {
    "Names and arguments": _NAMES,
    "Steps, epochs and hooks": _STEPS,
    "Logging and metrics": _LOGGING,
    "Data and predictions": _DATA,
    "Checkpoints, resuming and early stopping": _CHECKPOINTS,
}
"""The rows by the headings of the page."""

DIFFERENCES = tuple(row for rows in SECTIONS.values() for row in rows)


def table() -> str:
    """Return the Markdown tables of `docs/migrating.md`, each under its heading."""
    tables = []
    for title, rows in SECTIONS.items():
        lines = [f"| {row.lightning} | {row.here} |" for row in rows]
        tables.append("\n".join([f"### {title}", "", "| Lightning | here |", "|---|---|", *lines]))
    return "\n\n".join(tables)


if __name__ == "__main__":
    print(table())
