"""Measure the cost of a setting in step time:
``python -m benchmarks.steps.vary [--vary FIELD=A,B ...] [--size 10m] [--quick]``.

Unbroken training runs with the values A and B of a field of RunConfig in turns, so that other load
affects both, and their median steps are compared. The default is to vary audits and copies in
memory, off and on. Writes results/vary.json. Exit status 1 if a setting costs more than --limit
allows.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_type_hints

import msgspec

from benchmarks.harness.bars import Bar, Report, look_at_machine, show
from benchmarks.harness.lab import WARM_UP, Lab, show_progress, step_seconds
from benchmarks.harness.results import RESULTS, save
from chaoskit.config import RunConfig
from chaoskit.errors import BadInput

#: What is compared where nothing is asked for; a field that this version does not have is left out.
USUAL = ("audit_every=0,8", "memory_copies=0,2")

_ROUNDS, _STEPS = 5, 40


class Variation(NamedTuple):
    """Two values of one field: ``base`` is compared with ``other``."""

    field: str
    base: Any
    other: Any

    def __str__(self) -> str:
        return f"{self.field} = {self.other} beside {self.base}"


def parse(text: str) -> Variation:
    """Return the variation that ``text`` describes, such as ``hash_every=0,1``.

    Raises:
        BadInput: if this is no field of RunConfig with two values of its type.
    """
    field, _, values = text.partition("=")
    pair = [text_value.strip() for text_value in values.split(",")]
    field_types = get_type_hints(RunConfig)
    if field not in field_types or field == "job":
        raise BadInput("vary", text, f"name one of {', '.join(sorted(set(field_types) - {'job'}))}")
    if len(pair) != 2:
        raise BadInput("vary", text, f"give two values: {field}=A,B")
    return Variation(field, *(_value(text, text_value, field_types[field]) for text_value in pair))


def _value(text: str, value: str, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadInput("vary", text, f"mend the value {value!r}: {error}") from None


def usual() -> list[Variation]:
    """Return the variations of :data:`USUAL` that this version has.

    Raises:
        BadInput: if it has none.
    """
    variations = [
        parse(text) for text in USUAL if text.partition("=")[0] in RunConfig.__struct_fields__
    ]
    if not variations:
        raise BadInput(
            "vary",
            None,
            "name a field and two values, such as buckets=1,4: the usual ones are not here",
        )
    return variations


def compare(lab: Lab, variations: Sequence[Variation], size: str, limit: float | None) -> list[Bar]:
    """Return a bar for each variation.

    All segments take turns in each round, and each round begins with another segment.
    """
    segments = [(number, side) for number in range(len(variations)) for side in (0, 1)]
    medians: dict[tuple[int, int], list[float]] = {segment: [] for segment in segments}
    steps = WARM_UP + (15 if lab.smoke else _STEPS)
    for turn in range(lab.repeats(_ROUNDS)):
        start = turn % len(segments)
        for number, side in (*segments[start:], *segments[:start]):
            field, *values = variations[number]
            seconds = step_seconds(lab.run(steps=steps, size=size, **{field: values[side]}))
            medians[number, side].append(median(seconds))
            show_progress(
                f"    round {turn + 1}, {field}={values[side]}: median step {median(seconds) * 1e3:.1f} ms"
            )
    return [
        cost(variation, medians[number, 0], medians[number, 1], size, limit)
        for number, variation in enumerate(variations)
    ]


def cost(
    variation: Variation,
    base: Sequence[float],
    other: Sequence[float],
    size: str,
    limit: float | None,
) -> Bar:
    """Return a bar on the cost of ``other`` compared with ``base``; both are seconds of a step, one
    median a round.
    """
    rounds = [other_s / base_s for other_s, base_s in zip(other, base, strict=True)]
    ratio = median(other) / median(base)
    return Bar(
        topic="vary",
        name=f"gpt {size}, {variation}: step time",
        measured=f"{ratio:.3f} ({median(other) * 1e3:.1f} ms to {median(base) * 1e3:.1f} ms; "
        f"rounds {min(rounds):.2f} to {max(rounds):.2f})",
        limit="" if limit is None else f"{limit:.2f}",
        met=None if limit is None else ratio <= limit,
        samples={"base": list(base), "other": list(other), "ratios": rounds},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="may be given several times",
    )
    parser.add_argument("--size", default="10m", help="of gpt")
    parser.add_argument(
        "--limit",
        type=float,
        help="largest ratio of the step times, B to A; default: only measured",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: the tiny job, one round, no claims"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    try:
        variations = [parse(text) for text in options.vary] or usual()
        machine, size = look_at_machine(), "tiny" if options.quick else options.size
        with Lab(smoke=options.quick) as lab:
            bars = compare(lab, variations, size, options.limit)
    except BadInput as error:
        parser.error(str(error))
    report = Report(machine=machine, smoke=options.quick, bars=bars)
    save(report, options.results, "vary")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
