"""The state of a run as its ranks describe it: at the end finite, and the twin's; early that of plain PyTorch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter

from chaoskit.experiment.reference.floor import ORDERS, Floor
from chaoskit.journal import Record
from chaoskit.plaintext import plural
from chaoskit.runlog.findings import conclude
from chaoskit.runlog.outcome import Check
from chaoskit.vocabulary import Event

FINITE = "final state is finite"
EQUAL = "final state equals the twin's"

#: Where sums have no fixed order a tensor may lie so many floors from the twin's.
MARGIN = 4.0

_OTHER_BITS = "SHA-256 of all tensors differs, as ranks ended after they had described them"
_OTHER_SCALARS = "learning rates, schedules or counts of the optimizer are other ones"

#: Of one tensor: values that are not finite, squared norm, projections. See :mod:`chaoskit.sketch`.
Numbers = list[float]
_Box = tuple[tuple[float, ...], tuple[float, ...]]


def ending(records: Iterable[Record]) -> dict[str, Numbers]:
    """Return path -> numbers of each tensor at the last step, over all ranks; empty where no rank wrote them down."""
    told = _told(records)
    return described(told, max((record["step"] for record in told), default=0))


def described(records: Iterable[Record], step: int) -> dict[str, Numbers]:
    """Return path -> numbers of each tensor behind so many steps, over all ranks of the last generation that told them.

    A box that several ranks hold counts once. Where they differ the numbers are NaN.
    """
    told = [record for record in _told(records) if record["step"] == step]
    last = max((record["generation"] for record in told), default=0)
    boxes: dict[str, dict[_Box, Numbers]] = defaultdict(dict)
    for record in told:
        if record["generation"] == last:
            for path, (start, extent, numbers) in record["tensors"].items():
                box, known = (
                    (tuple(start), tuple(extent)),
                    [math.nan if one is None else one for one in numbers],
                )
                if boxes[path].setdefault(box, known) != known:
                    boxes[path][box] = [math.nan] * len(known)
    return {
        path: [
            math.fsum(column) for column in zip(*(held[box] for box in sorted(held)), strict=True)
        ]
        for path, held in sorted(boxes.items())
    }


def scalars(records: Iterable[Record]) -> str:
    """Return the digest of what of the final state is no tensor; "" where ranks tell of none, or of different ones."""
    told = _told(records)
    last = max((record["step"] for record in told), default=0)
    found = {record["scalars"] for record in told if record["step"] == last}
    return found.pop() if len(found) == 1 else ""


def rates(records: Iterable[Record], step: int) -> list[float] | None:
    """Return the learning rates behind so many steps; None where ranks tell of none, or of different ones."""
    told = [record for record in _told(records) if record["step"] == step]
    last = max((record["generation"] for record in told), default=0)
    found = {tuple(record["rates"]) for record in told if record["generation"] == last}
    return [*found.pop()] if len(found) == 1 else None


def _told(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.event == Event.STATE]


def check_finite(found: dict[str, Numbers]) -> Check:
    """Passed if every value of every tensor is a finite number, and ranks that hold a value agree on it."""
    wrong = {path: numbers[0] for path, numbers in found.items() if numbers[0] != 0}
    problems = [
        f"{path}: ranks hold different values of it"
        if math.isnan(count)
        else f"{path}: {count:.0f} values are not finite"
        for path, count in wrong.items()
    ]
    return conclude(
        FINITE,
        problems,
        f"{plural(len(found), 'tensor')} of weights and optimizer",
        looked_at=len(found),
    )


def check_equal(
    found: dict[str, Numbers],
    other: dict[str, Numbers],
    *,
    scalars_differ: bool = False,
    bits_differ: bool = False,
    name: str = EQUAL,
) -> Check:
    """Passed if the numbers of all tensors are the other's: the twin's, or the reference's.

    Args:
        scalars_differ: learning rates, schedules or counts are other ones.
        bits_differ: the digest of all tensors with which ranks ended is another one.
        name: of the check.
    """
    problems = [
        f"{path}: {_difference(found.get(path), other.get(path))}" for path in _odd(found, other)
    ]
    problems += [_OTHER_SCALARS] if scalars_differ else []
    problems += [_OTHER_BITS] if bits_differ and not problems else []
    fine = f"norm and projections of {plural(len(other), 'tensor')} of weights and optimizer"
    return conclude(name, problems, fine, looked_at=len(other))


def check_near(
    found: dict[str, Numbers],
    other: dict[str, Numbers],
    floor: Floor,
    *,
    scalars_differ: bool = False,
    name: str = EQUAL,
) -> Check:
    """Passed if every tensor is as near to the other's as another order of the sums explains.

    Args:
        scalars_differ: learning rates, schedules or counts are other ones: no order of a sum changes these.
        name: of the check.
    """
    odd = sorted(found.keys() ^ other.keys())
    far = {
        path: _floors(found[path], theirs, floor, path)
        for path, theirs in other.items()
        if path in found
    }
    furthest = sorted(far.items(), key=itemgetter(1), reverse=True)
    problems = [f"{path}: {_difference(found.get(path), other.get(path))}" for path in odd] + [
        f"{path}: {ratio:.3g} floors away, {MARGIN:g} are allowed; {_difference(found[path], other[path])}"
        for path, ratio in furthest
        if not ratio <= MARGIN
    ]
    problems += [_OTHER_SCALARS] if scalars_differ else []
    fine = f"{plural(len(other), 'tensor')} of weights and optimizer, each within {MARGIN:g} floors"
    fine += "".join(f"; the furthest, {path}, at {ratio:.2g}" for path, ratio in furthest[:1])
    fine += (
        f"; a floor of {floor.orders} orders, {floor.factor:.3g} times"
        if floor.orders < ORDERS
        else ""
    )
    return conclude(name, problems, fine, looked_at=len(far))


def _floors(mine: Numbers, theirs: Numbers, floor: Floor, path: str) -> float:
    """How many floors two tensors are apart; infinite where one is not made of numbers."""
    apart = _distance(mine, theirs)
    if apart == 0.0 or math.isinf(apart):
        return apart
    least = floor.of(path, math.sqrt(theirs[1]))
    return apart / least if least else math.inf


def _distance(mine: Numbers, theirs: Numbers) -> float:
    """Estimate the 2-norm of the difference of two tensors: that of the differences of their projections."""
    distance = math.sqrt(
        math.fsum((one - other) ** 2 for one, other in zip(mine[2:], theirs[2:], strict=True))
    )
    return math.inf if mine[0] != theirs[0] or math.isnan(distance) else distance


def _odd(found: dict[str, Numbers], twin: dict[str, Numbers]) -> Sequence[str]:
    return [
        path for path in sorted(found.keys() | twin.keys()) if found.get(path) != twin.get(path)
    ]


def _difference(mine: Numbers | None, theirs: Numbers | None) -> str:
    if mine is None or theirs is None:
        return "it is there in this run only" if theirs is None else "missing"
    if math.isnan(mine[0]) or math.isnan(theirs[0]):
        return "ranks hold different values of it" + (
            "" if math.isnan(mine[0]) else " in the other run"
        )
    return f"norm {math.sqrt(mine[1]):.9g} instead of {math.sqrt(theirs[1]):.9g}"
