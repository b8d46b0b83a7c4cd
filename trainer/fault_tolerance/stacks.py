"""Describe where the threads of this process are."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from types import FrameType

_MOST_CALLS = 4


def stacks() -> str:
    """Return the stacks of all Python threads except the calling one, the main thread first.

    The source lines are left out: reading them could hang as well, on a file system that hangs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    lines = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        lines.append(f"  thread {names.get(ident, ident)} (most recent call last):")
        lines += [
            f'    File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'
            for frame in reversed(_walk(frames[ident]))
        ]
    return "\n".join(lines) + "\n"


def where() -> str:
    """Return the main thread's innermost call outside of torch, DeepSpeed and the standard library.

    If that is a call in this package, the user's call that led to it is added.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _innermost([(one, one.f_lineno) for one in _walk(frame)])


def innermost_call() -> object:
    """Return what stays the same while the main thread is in one call of C code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


def users_calls() -> str:
    """Return the user's calls that led here, the innermost first, without folders, which differ between machines."""
    calls = []
    for frame in _walk(sys._getframe(1)):
        if not _is_of_this_package(frame) and frame.f_globals.get("__name__", "").partition(".")[0] != "torch":
            calls.append(f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})")
        if calls and (_is_of_this_package(frame) or len(calls) == _MOST_CALLS or frame.f_code.co_name == "<module>"):
            break  # what starts a program differs between the processes
    return ", called from ".join(calls)


def raised_in(error: BaseException) -> str:
    """Return the same description of the calls that raised `error`."""
    return _innermost(list(traceback.walk_tb(error.__traceback__))[::-1])


def _innermost(calls: list[tuple[FrameType, int]]) -> str:
    if not calls:
        return "an unknown place"
    library = tuple({sysconfig.get_path("stdlib"), *filter(None, map(_folder_of, ("torch", "deepspeed")))})
    calls = [one for one in calls if not _passes_on(one[0], library)] or calls[:1]
    users = next((one for one in calls if not _is_of_this_package(one[0])), None)
    if users is None or users is calls[0]:
        return _location(*calls[0])
    return f"{_location(*calls[0])}, called from {_location(*users)}"


def _passes_on(frame: FrameType, library: tuple[str, ...]) -> bool:
    """Whether a frame is of a library, or of a mode through which calls of torch go."""
    code = frame.f_code
    return code.co_filename.startswith((*library, "<")) or code.co_name == "__torch_function__"


def _location(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{line})"


def _is_of_this_package(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == __name__.partition(".")[0]


def _folder_of(package: str) -> str | None:
    module = sys.modules.get(package)
    return os.path.dirname(str(module.__file__)) if module is not None else None


def _walk(frame: FrameType | None) -> list[FrameType]:
    """Return the frames from the innermost call outwards."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
