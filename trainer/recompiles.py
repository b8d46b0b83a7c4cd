"""Recompiles: a warning when torch.compile compiles the same code again and again, with the cause."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("trainer")

TOO_OFTEN = 3
"""As many compilations for one cause are not normal: sizes that vary cost one, evaluation mode another."""

ADVICE = (
    (
        r"Guard failed on a parameter|_parameters\[",
        "Several modules of one class share compiled code, but their weights differ in shape: compile what holds them "
        "as a whole (compile=True), or give compile={'blocks': ...} the classes whose members are alike.",
    ),
    (
        r"size mismatch|stride mismatch|rank mismatch|\.size\(\)|shape",
        "Inputs change their shape: set compile={'dynamic': True}, pad them to a few lengths, or drop_last=True.",
    ),
    (
        r"dtype mismatch|dispatch key set mismatch|requires_grad mismatch",
        "Inputs change their dtype, device or need of a gradient from call to call: make them alike.",
    ),
    (
        r" == |___check_obj_id|___check_type_id|dict|len\(",
        "A Python value that changes is read in compiled code: hand it over as a tensor, keep it in a buffer, or read "
        "it in the step, outside of forward.",
    ),
)
"""What to do, by what torch says of the cause."""


class RecompileWatch:
    """Looks at torch's record of compilations whenever one is over; it costs nothing in between.

    torch closes the record of a compilation only after it tells that it is over, so a warning may come with the next
    one, or at the end.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import get_compilation_metrics

        self._handler = callback_handler
        self._read: Callable[[], list[Any]] = get_compilation_metrics
        self._seen = {id(record): record for record in self._read()}
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self.compilations = len(self._seen)
        """How many there have been in this process, as far as torch remembers."""
        callback_handler.register_end_callback(self._look)

    def close(self) -> None:
        """A last look."""
        self._look()
        self._handler.remove_end_callback(self._look)

    def _look(self, *event: Any) -> None:
        records = self._read()
        new = [record for record in records if id(record) not in self._seen]
        self._seen = {id(record): record for record in records}  # held, so that an id means one record
        self.compilations += len(new)
        for record in new:
            if record.recompile_reason:
                self._count(record)

    def _count(self, record: Any) -> None:
        reason = re.sub(r"^\d+/\d+: ", "", str(record.recompile_reason).strip())
        # The numbers differ from time to time, the cause does not.
        cause = (record.co_filename, record.co_firstlineno, record.co_name, re.sub(r"-?\d+(\.\d+)?", "#", reason))
        self._counts[cause] += 1
        if self._counts[cause] == TOO_OFTEN:
            log.warning("%s", _in_words(record, reason))


def _in_words(record: Any, reason: str) -> str:
    from torch._dynamo import config

    advice = next((words for pattern, words in ADVICE if re.search(pattern, reason)), "")
    where = f"{record.co_name} ({Path(record.co_filename or '?').name}:{record.co_firstlineno})"
    return (
        f"compile: {where} has been compiled again {TOO_OFTEN} times for the same cause, which takes its time: "
        f"{' '.join(reason.split())}. {advice} After {config.recompile_limit} compilations torch gives up "
        "and runs it uncompiled. TORCH_LOGS=recompiles in the environment shows each one."
    )
