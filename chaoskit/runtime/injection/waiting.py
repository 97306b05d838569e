"""Acts that keep the training thread from going on, and a second look at where it stands."""

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
from chaoskit.runtime.group.collective import Group
from chaoskit.runtime.injection.context import InjectionContext, Report

#: How long a thread must stand before :func:`watch` reports it.
STILL_S = 0.05  # a thread that works is switched or moves on much sooner
_LOOK_S = 0.005
_GIVE_UP_S = 10.0
_FRAMES = 4
_UNUSED_TAG = 2**20  # far above those of the reductions


def hold_gil(context: InjectionContext, options: dict[str, Any]) -> None:
    """PyDLL calls native code without releasing the GIL; pause() never returns."""
    context.report(
        False, "about to call pause() with the interpreter lock held"
    )  # nothing can be said afterwards
    ctypes.PyDLL(None).pause()


def spin(context: InjectionContext, options: dict[str, Any]) -> None:
    """Burn CPU time for ever."""
    counter = 0
    while True:
        counter += 1


def wait_for_lock(context: InjectionContext, options: dict[str, Any]) -> None:
    """Wait for a Python lock that nobody will release. Other threads run on."""
    watch("wait_for_lock", context.report)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def skip_reduction(context: InjectionContext, options: dict[str, Any]) -> None:
    """Take no part in this step's reduction: wait for a message that nobody sends, until the group is left."""

    def act(group: Group) -> None:
        context.injected.on_reduction.remove(act)
        watch("skip_reduction", context.report)
        nothing = torch.empty(1)
        group.recv(nothing, (group.rank + 1) % group.size, _UNUSED_TAG).wait()

    context.injected.on_reduction.append(act)


def watch(place: str, report: Report) -> None:
    """Have another thread report once the calling one has not moved for a while in the function ``place``."""
    ident, tid = threading.get_ident(), threading.get_native_id()
    threading.Thread(
        target=_look, args=(ident, tid, place, report), name="watch", daemon=True
    ).start()


def _look(ident: int, tid: int, place: str, report: Report) -> None:
    """Standing still: the same Python frames, and not one context switch by the kernel's count."""
    begun_s = since_s = time.monotonic()
    before: tuple[str, int | None] | None = None
    while (now_s := time.monotonic()) - begun_s < _GIVE_UP_S:
        seen = (_stack(ident), switches(os.getpid(), tid))
        if seen != before or place not in seen[0]:
            before, since_s = seen, now_s
        elif now_s - since_s >= STILL_S:
            still_ms = (now_s - since_s) * 1000
            report(
                True,
                f"its thread {tid} has stood for {still_ms:.0f} ms, without a context switch, in {seen[0]}",
            )
            return
        time.sleep(_LOOK_S)


def _stack(ident: int) -> str:
    """The innermost frames of a thread, without those of :mod:`threading`."""
    frame = sys._current_frames().get(ident)
    frames: list[str] = []
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        if code.co_filename != threading.__file__:
            frames.append(f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(frames)


def stop_at(context: InjectionContext, options: dict[str, Any]) -> None:
    """Have the first thread that reaches a boundary of a copy stand there: it is reported when one does."""
    context.injected.breakpoints.set(options["place"], lambda seen: context.report(True, seen))
