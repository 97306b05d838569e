"""Samples of the text format of Prometheus, for abort conditions.

-> ``abort_conditions.py`` compares their values with a limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|$)')
# the braces of labels may hold braces in quotes
_LABELS = r'(?:[^"{}]|"(?:[^"\\]|\\.)*")*'
_SAMPLE = re.compile(rf"({_NAME})\s*(?:\{{({_LABELS})\}})?\s+(\S+)(?:\s+-?\d+)?\s*")
_SELECTOR = re.compile(rf"({_NAME})\s*(?:\{{({_LABELS})\}})?")
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}


class MetricSample(NamedTuple):
    """A value of a metric."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricSelector(NamedTuple):
    """The name of a metric, and labels that its samples must have."""

    name: str
    labels: Mapping[str, str]

    def selects(self, sample: MetricSample) -> bool:
        """Return True if a sample has the name and the labels; it may have more labels."""
        return sample.name == self.name and self.labels.items() <= sample.labels.items()


def parse_selector(text: str) -> MetricSelector:
    """Return the selector that a text such as ``errors_total{code="500"}`` holds.

    Raises:
        ValueError: if it is malformed.
    """
    match = _SELECTOR.fullmatch(text)
    if match is None:
        raise ValueError(f"no name of a metric: {text}")
    return MetricSelector(match[1], _labels(match[2] or ""))


def read_samples(text: str) -> list[MetricSample]:
    """Return the samples of a text in the format of Prometheus.

    Raises:
        ValueError: if a line is malformed.
    """
    lines = (line.strip() for line in text.split("\n"))
    return [_read_sample(line) for line in lines if line and not line.startswith("#")]


def _read_sample(line: str) -> MetricSample:
    """Return the sample of a line. Raises ValueError."""
    match = _SAMPLE.fullmatch(line)
    if match is None:
        raise ValueError(f"no sample of a metric: {line[:100]}")
    return MetricSample(match[1], _labels(match[2] or ""), float(match[3]))


def _labels(text: str) -> dict[str, str]:
    """Return the labels between two braces. Raises ValueError."""
    labels = dict[str, str]()
    position = 0
    while text[position:].strip():
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError(f"no labels of a metric: {text[:100]}")
        labels[match[1]] = re.sub(
            r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), match[2]
        )
        position = match.end()
    return labels
