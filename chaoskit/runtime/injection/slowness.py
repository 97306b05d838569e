"""Acts that make a rank slow without stopping it.

-> faults/processes/slow.py orders them. coordinator/detectors/stragglers.py finds slow ranks.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from chaoskit.process.linux import set_name
from chaoskit.runtime.injection.context import InjectionContext
from chaoskit.runtime.injection.waiting import STILL_S, watch

_DUTY_PERIOD_S = 0.01


def delay(context: InjectionContext, options: dict[str, Any]) -> None:
    """Sleep ``delay_ms`` on entering each phase of each shard, for ``steps`` steps.

    Only the first delay is reported. One of more than 0.1 s is also reported while it lasts.
    """
    delay_s, end = options["delay_ms"] / 1000, context.step + options["steps"]
    delays_s: list[float] = []

    def act(phase: str, step: int) -> None:
        if step >= end:
            context.injected.on_phase.remove(act)
            return
        begun_s = time.monotonic()
        time.sleep(delay_s)
        delays_s.append(time.monotonic() - begun_s)
        if len(delays_s) == 1:
            is_late = delays_s[0] >= delay_s
            context.report(
                is_late, f"{phase} of step {step} began {delays_s[0] * 1000:.1f} ms late"
            )

    context.injected.on_phase.append(act)
    if delay_s > 2 * STILL_S:
        watch("delay", context.report)  # a thread that sleeps for long cannot measure it in time
    act(context.phase, context.step)


def burn(context: InjectionContext, options: dict[str, Any]) -> None:
    """Start a thread ``name`` that uses ``cpu_fraction`` of a CPU for ``steps`` steps.

    There is no report: the fault reads the CPU time of the thread. ``cpu_fraction`` is 0 to 1.
    """
    ended, end = threading.Event(), context.step + options["steps"]

    def act(phase: str, step: int) -> None:
        if step >= end:
            context.injected.on_phase.remove(act)
            ended.set()

    context.injected.on_phase.append(act)
    threading.Thread(
        target=_burn, args=(options["name"], options["cpu_fraction"], ended), daemon=True
    ).start()


def _burn(name: str, cpu_fraction: float, ended: threading.Event) -> None:
    """Use a share of a CPU until ``ended`` is set."""
    set_name(name)
    while not ended.is_set():
        begun_s, burnt_s = time.monotonic(), time.thread_time()
        while time.thread_time() - burnt_s < cpu_fraction * _DUTY_PERIOD_S:
            pass
        ended.wait(max(0.0, _DUTY_PERIOD_S - (time.monotonic() - begun_s)))
