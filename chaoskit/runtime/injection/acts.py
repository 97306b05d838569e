"""The table of acts by name. A worker loads it when a fault orders the first act.

-> faults/processes and faults/numbers order the acts. step/hooks.py: where a worker waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaoskit.errors import ChaoskitError
from chaoskit.runtime.injection import clock, data, ending, numbers, slowness, waiting
from chaoskit.runtime.injection.context import InjectionContext

_ACTS: dict[str, Callable[[InjectionContext, dict[str, Any]], None]] = {
    "none": lambda context, options: None,
    "raise": ending.fail,
    "exit": ending.leave,
    "memory_error": ending.run_out_of_memory,
    "allocate": ending.allocate,
    "hold_gil": waiting.hold_gil,
    "spin": waiting.spin,
    "lock": waiting.wait_for_lock,
    "skip": waiting.skip_reduction,
    "nan": numbers.poison,
    "bit_flip": numbers.flip_bit,
    "poison_snapshot": numbers.poison_snapshot,
    "delay": slowness.delay,
    "burn": slowness.burn,
    "clock": clock.jump,
    "stall_fetch": data.stall,
    "bad_batch": data.spoil,
    "break": waiting.stop_at,
}


def carry_out(name: str, options: dict[str, Any], context: InjectionContext) -> None:
    """Carry out one act, now or at a later moment of the step.

    The act calls ``context.report(effective, observed)`` with the observed effect. Some acts that
    end, block or burden the process do not report: the fault observes those from outside.

    Raises:
        InjectedError: for the act ``raise``.
        MemoryError: for ``memory_error``.
        BadInput: if the model lacks an object that the options name.
        ChaoskitError: if there is no act of this name, or the act needs a worker that trains.
    """
    act = _ACTS.get(name)
    if act is None:
        raise ChaoskitError(f"unknown act {name!r}")
    act(context, options)
