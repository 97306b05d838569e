"""Levers that make a rank slow without stopping it."""

from __future__ import annotations

import threading
import time
from typing import Any

from chaoskit.osprocess import set_name
from chaoskit.runtime.levers.rig import Bench
from chaoskit.runtime.levers.waiting import STILL_S, watch

_DUTY_PERIOD_S = 0.01


def delay(bench: Bench, options: dict[str, Any]) -> None:
    """Sleep ``delay_ms`` on entering each phase of each shard, in this step and the next, ``steps`` in all."""
    delay_s, end = options["delay_ms"] / 1000, bench.step + options["steps"]
    delays_s: list[float] = []

    def act(phase: str, step: int) -> None:
        if step >= end:
            bench.rig.on_phase.remove(act)
            return
        begun_s = time.monotonic()
        time.sleep(delay_s)
        delays_s.append(time.monotonic() - begun_s)
        if len(delays_s) == 1:
            late = delays_s[0] >= delay_s
            bench.report(late, f"{phase} of step {step} began {delays_s[0] * 1000:.1f} ms late")

    bench.rig.on_phase.append(act)
    if delay_s > 2 * STILL_S:
        watch("delay", bench.report)  # who sleeps for too long does not come to measure it
    act(bench.phase, bench.step)


def burn(bench: Bench, options: dict[str, Any]) -> None:
    """Have a thread of the given ``name`` burn ``cpu_fraction`` of a CPU, in turns with rests, for ``steps`` steps."""
    over, end = threading.Event(), bench.step + options["steps"]

    def act(phase: str, step: int) -> None:
        if step >= end:
            bench.rig.on_phase.remove(act)
            over.set()

    bench.rig.on_phase.append(act)
    threading.Thread(target=_burn, args=(options["name"], options["cpu_fraction"], over), daemon=True).start()


def _burn(name: str, cpu_fraction: float, over: threading.Event) -> None:
    set_name(name)
    while not over.is_set():
        begun_s, burnt_s = time.monotonic(), time.thread_time()
        while time.thread_time() - burnt_s < cpu_fraction * _DUTY_PERIOD_S:
            pass
        over.wait(max(0.0, _DUTY_PERIOD_S - (time.monotonic() - begun_s)))
