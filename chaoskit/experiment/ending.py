"""The state with which a run ended, as its ranks describe it: finite, and the twin's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from chaoskit.experiment.findings import conclude
from chaoskit.experiment.outcome import Check
from chaoskit.journal import Record
from chaoskit.vocabulary import Event

FINITE = "final state is finite"
EQUAL = "final state equals the twin's"

#: Of one tensor: values that are not finite, squared norm, projections. See :mod:`chaoskit.runtime.final_state`.
Numbers = list[float]
_Box = tuple[tuple[float, ...], tuple[float, ...]]


def ending(records: Iterable[Record]) -> dict[str, Numbers]:
    """Return path -> numbers of each tensor at the last step, over all ranks; empty where no rank wrote them down.

    A box that several ranks hold counts once. Where they differ the numbers are NaN.
    """
    told = [record for record in records if record.event == Event.FINAL_STATE]
    last = max((record["step"] for record in told), default=0)
    boxes: dict[str, dict[_Box, Numbers]] = defaultdict(dict)
    for record in told:
        if record["step"] == last:
            for path, (start, extent, numbers) in record["tensors"].items():
                box, known = (tuple(start), tuple(extent)), [math.nan if one is None else one for one in numbers]
                if boxes[path].setdefault(box, known) != known:
                    boxes[path][box] = [math.nan] * len(known)
    return {
        path: [math.fsum(column) for column in zip(*(held[box] for box in sorted(held)), strict=True)]
        for path, held in sorted(boxes.items())
    }


def check_finite(found: dict[str, Numbers]) -> Check:
    """Passed if every value of every tensor is a finite number."""
    wrong = {path: numbers[0] for path, numbers in found.items() if numbers[0] != 0}
    problems = [f"{path}: {count:.0f} values are not finite" for path, count in wrong.items()]
    return conclude(FINITE, problems, f"{len(found)} tensors of weights and optimizer", looked_at=len(found))


def check_equal(found: dict[str, Numbers], twin: dict[str, Numbers]) -> Check:
    """Passed if the numbers of all tensors are the twin's."""
    problems = [f"{path}: {_difference(found.get(path), twin.get(path))}" for path in _odd(found, twin)]
    fine = f"norm and projections of {len(twin)} tensors of weights and optimizer"
    return conclude(EQUAL, problems, fine, looked_at=len(twin))


def _odd(found: dict[str, Numbers], twin: dict[str, Numbers]) -> Sequence[str]:
    return [path for path in sorted(found.keys() | twin.keys()) if found.get(path) != twin.get(path)]


def _difference(mine: Numbers | None, theirs: Numbers | None) -> str:
    if mine is None or theirs is None:
        return "not in the twin's state" if theirs is None else "missing"
    return f"norm {math.sqrt(mine[1]):.9g} instead of {math.sqrt(theirs[1]):.9g}"
