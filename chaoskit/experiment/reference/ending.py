"""Comparison of the state of a run, as its ranks describe it, with that of its twin or of plain
PyTorch.

-> sketch.py: the numbers by which a rank describes a tensor. experiment/reference/floor.py: the
allowed distance. experiment/judge/comparison.py: which comparison applies to a run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter

from chaoskit.experiment.reference.floor import ORDERS, Floor
from chaoskit.journal import Record
from chaoskit.plaintext import plural
from chaoskit.runlog.checks import conclude
from chaoskit.runlog.outcome import Check
from chaoskit.vocabulary import Event

FINITE = "final state is finite"
EQUAL = "final state equals the twin's"

#: Allowed distance from the twin, in floors, if sums have no fixed order.
MARGIN = 4.0

_OTHER_BITS = "SHA-256 of all tensors differs, as ranks ended after they had described them"
_OTHER_SCALARS = "learning rates, schedules or counts of the optimizer differ"

#: The numbers of a tensor: count of values that are not finite, squared norm, projections. See
#: :mod:`chaoskit.sketch`.
Numbers = list[float]
_Box = tuple[tuple[float, ...], tuple[float, ...]]


def ending(records: Iterable[Record]) -> dict[str, Numbers]:
    """Return path -> numbers of each tensor after the last step, over all ranks.

    The result is empty if no rank described its state.
    """
    state_records = _state_records(records)
    return described(state_records, max((record["step"] for record in state_records), default=0))


def described(records: Iterable[Record], step: int) -> dict[str, Numbers]:
    """Return path -> numbers of each tensor after so many steps.

    The ranks of the last generation that described it count.

    A part of a tensor that several ranks hold counts once. If these ranks differ, its numbers are
    NaN.
    """
    state_records = [record for record in _state_records(records) if record["step"] == step]
    last_generation = max((record["generation"] for record in state_records), default=0)
    boxes: dict[str, dict[_Box, Numbers]] = defaultdict(dict)
    for record in state_records:
        if record["generation"] == last_generation:
            for path, (start, extent, numbers) in record["tensors"].items():
                box, values = (
                    (tuple(start), tuple(extent)),
                    [math.nan if number is None else number for number in numbers],
                )
                if boxes[path].setdefault(box, values) != values:
                    boxes[path][box] = [math.nan] * len(values)
    return {
        path: [
            math.fsum(column)
            for column in zip(*(numbers_by_box[box] for box in sorted(numbers_by_box)), strict=True)
        ]
        for path, numbers_by_box in sorted(boxes.items())
    }


def scalars(records: Iterable[Record]) -> str:
    """Return the digest of the final state without tensors, such as rates and counts.

    It is "" if ranks have none, or differ.
    """
    state_records = _state_records(records)
    last_step = max((record["step"] for record in state_records), default=0)
    digests = {record["scalars"] for record in state_records if record["step"] == last_step}
    return digests.pop() if len(digests) == 1 else ""


def rates(records: Iterable[Record], step: int) -> list[float] | None:
    """Return the learning rates after so many steps; None if ranks recorded none, or differ."""
    state_records = [record for record in _state_records(records) if record["step"] == step]
    last_generation = max((record["generation"] for record in state_records), default=0)
    recorded_rates = {
        tuple(record["rates"])
        for record in state_records
        if record["generation"] == last_generation
    }
    return [*recorded_rates.pop()] if len(recorded_rates) == 1 else None


def _state_records(records: Iterable[Record]) -> list[Record]:
    """Return the records that describe a rank's state."""
    return [record for record in records if record.event == Event.STATE]


def check_finite(measured: dict[str, Numbers]) -> Check:
    """Return the check that all values are finite, and equal on all ranks that hold them.

    It is unknown without a tensor.
    """
    bad_counts = {path: numbers[0] for path, numbers in measured.items() if numbers[0] != 0}
    problems = [
        f"{path}: ranks hold different values of it"
        if math.isnan(count)
        else f"{path}: {count:.0f} values are not finite"
        for path, count in bad_counts.items()
    ]
    return conclude(
        FINITE,
        problems,
        f"{plural(len(measured), 'tensor')} of weights and optimizer",
        looked_at=len(measured),
    )


def check_equal(
    measured: dict[str, Numbers],
    expected: dict[str, Numbers],
    *,
    scalars_differ: bool = False,
    bits_differ: bool = False,
    name: str = EQUAL,
) -> Check:
    """Return the check that the numbers of all tensors equal those of the twin or the reference.

    A tensor that only one of the states has fails it, too. It is unknown if both are empty.

    Args:
        measured: the state of the run.
        expected: the state of the twin or the reference.
        scalars_differ: learning rates, schedules or counts differ.
        bits_differ: the digests of all tensors with which ranks ended differ.
        name: the name of the check.
    """
    problems = [
        f"{path}: {_difference(measured.get(path), expected.get(path))}"
        for path in _differing_paths(measured, expected)
    ]
    problems += [_OTHER_SCALARS] if scalars_differ else []
    problems += [_OTHER_BITS] if bits_differ and not problems else []
    passed_detail = (
        f"norm and projections of {plural(len(expected), 'tensor')} of weights and optimizer"
    )
    return conclude(name, problems, passed_detail, looked_at=len(expected))


def check_near(
    measured: dict[str, Numbers],
    expected: dict[str, Numbers],
    floor: Floor,
    *,
    scalars_differ: bool = False,
    name: str = EQUAL,
) -> Check:
    """Return the check that every tensor is within a margin of the floor of the other's.

    A tensor that only one of the states has fails it, too. It is unknown if both are empty.

    Args:
        measured: the state of the run.
        expected: the state of the twin or the reference.
        floor: the distance between the ends of correct runs.
        scalars_differ: learning rates, schedules or counts differ, which no order of a sum changes.
        name: the name of the check.
    """
    one_sided_paths = sorted(measured.keys() ^ expected.keys())
    ratios = {
        path: _floors(measured[path], other_numbers, floor, path)
        for path, other_numbers in expected.items()
        if path in measured
    }
    furthest = sorted(ratios.items(), key=itemgetter(1), reverse=True)
    problems = [
        f"{path}: {_difference(measured.get(path), expected.get(path))}" for path in one_sided_paths
    ] + [
        f"{path}: {ratio:.3g} floors away, {MARGIN:g} are allowed; {_difference(measured[path], expected[path])}"
        for path, ratio in furthest
        if not ratio <= MARGIN
    ]
    problems += [_OTHER_SCALARS] if scalars_differ else []
    passed_detail = (
        f"{plural(len(expected), 'tensor')} of weights and optimizer, each within {MARGIN:g} floors"
    )
    passed_detail += "".join(
        f"; the furthest, {path}, at {ratio:.2g}" for path, ratio in furthest[:1]
    )
    passed_detail += (
        f"; a floor of {floor.orders} orders, {floor.factor:.3g} times"
        if floor.orders < ORDERS
        else ""
    )
    return conclude(name, problems, passed_detail, looked_at=len(ratios))


def _floors(numbers: Numbers, other_numbers: Numbers, floor: Floor, path: str) -> float:
    """Return the distance of two tensors in floors.

    It is infinite if the tensors cannot be compared, or differ although the floor is 0.
    """
    distance = _distance(numbers, other_numbers)
    if distance == 0.0 or math.isinf(distance):
        return distance
    floor_distance = floor.of(path, math.sqrt(other_numbers[1]))
    return distance / floor_distance if floor_distance else math.inf


def _distance(numbers: Numbers, other_numbers: Numbers) -> float:
    """Return an estimate of the 2-norm of the difference of two tensors, from projections.

    It is infinite if a number is NaN, or the counts of values that are not finite differ.
    """
    distance = math.sqrt(
        math.fsum(
            (projection - other_projection) ** 2
            for projection, other_projection in zip(numbers[2:], other_numbers[2:], strict=True)
        )
    )
    return math.inf if numbers[0] != other_numbers[0] or math.isnan(distance) else distance


def _differing_paths(measured: dict[str, Numbers], expected: dict[str, Numbers]) -> Sequence[str]:
    """Return the paths of tensors that differ."""
    return [
        path
        for path in sorted(measured.keys() | expected.keys())
        if measured.get(path) != expected.get(path)
    ]


def _difference(numbers: Numbers | None, other_numbers: Numbers | None) -> str:
    """Return in words how two tensors differ."""
    if numbers is None or other_numbers is None:
        return "it exists in this run only" if other_numbers is None else "missing"
    if math.isnan(numbers[0]) or math.isnan(other_numbers[0]):
        return "ranks hold different values of it" + (
            "" if math.isnan(numbers[0]) else " in the other run"
        )
    return f"norm {math.sqrt(numbers[1]):.9g} instead of {math.sqrt(other_numbers[1]):.9g}"
