"""Files of results: a small summary of each benchmark, which git tracks, and its samples, which git
ignores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.harness.bars import Bar, Report, Summary

#: The folder of the summaries that ``benchmarks/results.md`` and the table of the README are generated from.
RESULTS = Path(__file__).parents[1] / "results"


def save(report: Report, directory: Path, name: str) -> None:
    """Write the summary of ``report`` to ``name.json`` and the report with its samples to
    ``samples/name.json``.
    """
    bars = [
        msgspec.structs.replace(bar, samples={}, summaries=summarize(bar)) for bar in report.bars
    ]
    summary = msgspec.to_builtins(msgspec.structs.replace(report, bars=bars))
    samples = msgspec.json.format(msgspec.json.encode(report), indent=2)
    write(directory, name, summary, samples.decode())


def write(directory: Path, name: str, summary: Mapping[str, Any], samples: str) -> None:
    """Write ``summary`` to ``name.json`` and the text of ``samples`` to ``samples/name.json``."""
    (directory / "samples").mkdir(parents=True, exist_ok=True)
    (directory / "samples" / f"{name}.json").write_text(samples + "\n", encoding="utf-8")
    (directory / f"{name}.json").write_text(json_of(summary), encoding="utf-8")


def summarize(bar: Bar) -> dict[str, Summary]:
    """Return a summary of each list of durations or ratios among the samples of ``bar``."""
    return {
        quantity: Summary(len(samples), median(samples), max(samples))
        for quantity, samples in bar.samples.items()
        if isinstance(samples, list)
        and samples
        and all(isinstance(sample, float) for sample in samples)
    }


def json_of(fields: Mapping[str, Any]) -> str:
    """Return ``fields`` as JSON with a line for each field and for each element of a list."""
    lines = []
    for name, content in fields.items():
        text = json.dumps(content, ensure_ascii=False)
        if isinstance(content, list) and content:
            elements = ",\n".join(
                f"    {json.dumps(element, ensure_ascii=False)}" for element in content
            )
            text = f"[\n{elements}\n  ]"
        lines.append(f'  "{name}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
