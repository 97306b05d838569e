"""Acts that stop the training thread, and a check that it makes no progress.

-> faults/processes/hang.py and deadlock.py order them. coordinator/detectors/hang.py finds them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from chaoskit.process.linux import switches
from chaoskit.runtime.group.collective import CollectiveGroup
from chaoskit.runtime.injection.context import InjectionContext, Report

#: The time without progress after which :func:`watch` reports a thread.
STILL_S = 0.05  # a working thread is switched or moves much sooner
_LOOK_S = 0.005
_GIVE_UP_S = 10.0
_FRAMES = 4
_UNUSED_TAG = 2**20  # far above those of the reductions


def hold_gil(context: InjectionContext, options: dict[str, Any]) -> None:
    """Block in native code with the interpreter lock held.

    PyDLL calls native code without releasing the GIL, and pause() never returns. The report comes
    before, and says that there is no effect yet.
    """
    # reported first, as no report is possible from then on
    context.report(False, "about to call pause() with the interpreter lock held")
    ctypes.PyDLL(None).pause()


def spin(context: InjectionContext, options: dict[str, Any]) -> None:
    """Use CPU time for ever. Does not return, and does not report."""
    counter = 0
    while True:
        counter += 1


def wait_for_lock(context: InjectionContext, options: dict[str, Any]) -> None:
    """Wait for a Python lock that is never released, and do not return. Other threads run on.

    A thread of its own reports the effect once this one makes no progress.
    """
    watch("wait_for_lock", context.report)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def skip_reduction(context: InjectionContext, options: dict[str, Any]) -> None:
    """Take no part in this step's reduction: wait for a message that no rank sends.

    The wait ends with GroupFailed when the group is left.
    """

    def act(group: CollectiveGroup) -> None:
        context.injected.on_reduction.remove(act)
        watch("skip_reduction", context.report)
        unused = torch.empty(1)
        group.recv(unused, (group.rank + 1) % group.size, _UNUSED_TAG).wait()

    context.injected.on_reduction.append(act)


def watch(function_name: str, report: Report) -> None:
    """Start a thread that reports once the calling thread makes no progress in ``function_name``.

    It gives up after 10 s without a report.

    Args:
        function_name: a part of the qualified name of the function, as in its frame.
    """
    ident, tid = threading.get_ident(), threading.get_native_id()
    threading.Thread(
        target=_look, args=(ident, tid, function_name, report), name="watch", daemon=True
    ).start()


def _look(ident: int, tid: int, function_name: str, report: Report) -> None:
    """Report a thread once it makes no progress for :data:`STILL_S`, and give up after 10 s.

    It then has the same Python frames, and not one context switch by the kernel's count.
    """
    begun_s = since_s = time.monotonic()
    before: tuple[str, int | None] | None = None
    while (now_s := time.monotonic()) - begun_s < _GIVE_UP_S:
        current = (_stack(ident), switches(os.getpid(), tid))
        if current != before or function_name not in current[0]:
            before, since_s = current, now_s
        elif now_s - since_s >= STILL_S:
            still_ms = (now_s - since_s) * 1000
            report(
                True,
                f"thread {tid} made no progress for {still_ms:.0f} ms, without a context switch, "
                f"in {current[0]}",
            )
            return
        time.sleep(_LOOK_S)


def _stack(ident: int) -> str:
    """Return the innermost frames of a thread, without those of :mod:`threading`."""
    frame = sys._current_frames().get(ident)
    frames: list[str] = []
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        if code.co_filename != threading.__file__:
            frames.append(f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(frames)


def stop_at(context: InjectionContext, options: dict[str, Any]) -> None:
    """Have the first thread stop that reaches boundary ``place`` of a copy, and report it then."""
    context.injected.breakpoints.set(
        options["place"], lambda observed: context.report(True, observed)
    )
