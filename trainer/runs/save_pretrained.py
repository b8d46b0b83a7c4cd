"""Have `save_pretrained` of Hugging Face's models in a module write full weights, from rank 0, with any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.fault_tolerance.collective_check import wait_for_callers
from trainer.module import TrainModule
from trainer.strategy import inherits

if TYPE_CHECKING:
    from trainer.loop.run import Run


def gather_to_save(run: Run) -> None:
    """Replace `save_pretrained` of the models in the run's module, if there are several processes or shards."""
    plain = run.strategy.processes.world_size == 1 and inherits(run.strategy, "full_parameters")
    saving = _Saving(run)
    for child in run.module.modules():
        if isinstance(vars(child).get("save_pretrained"), GatheringSave):
            del child.__dict__["save_pretrained"]
        if not plain and not isinstance(child, TrainModule) and callable(getattr(child, "save_pretrained", None)):
            child.__dict__["save_pretrained"] = GatheringSave(child, saving)


class _Saving:
    """The run, and whether rank 0 is saving a model of it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.in_progress = False


class GatheringSave:
    """`model.save_pretrained`, called on all processes: rank 0 writes the full weights.

    With `state_dict=`, which holds the weights already, it is the model's own method. So it is for copies of the model.
    """

    def __init__(self, model: Any, saving: _Saving) -> None:
        self._model, self._saving = model, saving

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Write the model; returns what its own method returns, on rank 0.

        Raises:
            ConfigError: another process does not call this, or rank 0 could not write.
        """
        model, saving, run = self._model, self._saving, self._saving.run
        save = partial(type(model).save_pretrained, model, *args, **options)
        strategy, processes = run.strategy, run.strategy.processes
        if saving.in_progress or options.get("state_dict") is not None:
            return save()
        if run.session.stage is None and inherits(strategy, "full_parameters"):  # after a run without shards
            return save() if processes.is_global_zero else None
        wait_for_callers(processes, f"{type(model).__name__}.save_pretrained")
        result = error = None
        with strategy.full_parameters(model, write=False, on_rank_zero=True):
            if processes.is_global_zero:
                saving.in_progress = True
                try:
                    result = save()
                except Exception as problem:
                    error = problem
                finally:
                    saving.in_progress = False
        text = processes.broadcast_object(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if text is not None:
            raise ConfigError(f"rank 0 could not write {type(model).__name__}: {text}")
        return result

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Any:
        return partial(type(self._model).save_pretrained, memo.get(id(self._model), self._model))

    def __reduce__(self) -> Any:
        return partial, (type(self._model).save_pretrained, self._model)
