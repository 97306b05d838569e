"""Traces of spot machines, as they were published: when nodes came and went.

| format | what a file holds | published with |
|---|---|---|
| ``node-csv`` | lines ``MILLISECONDS,add\\|remove,NODE`` | Oobleck (SOSP 2023), its simulator's traces |
| ``count-csv`` | lines ``SECONDS,NODES``, in "scaled" files ``HOURS,NODES`` | Bamboo (NSDI 2023) |
| ``count-json`` | ``{"metadata": {"gap_seconds": S}, "data": [NODES, ...]}`` | SkyPilot's spot traces (NSDI 2024) |

    trace = read_trace(path).compressed(3600)             # an hour becomes a second
    for event in trace.events: ...                        # (time_s, node, joins)

Where a file has counts only, arriving nodes get fresh names, and who leaves is drawn by a seed.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

from chaoskit.errors import BadInput
from chaoskit.settings_file import parse_json


class TraceEvent(NamedTuple):
    """A node comes, or goes."""

    time_s: float
    node: str
    joins: bool


class Trace(NamedTuple):
    """What happened, in its order. Nodes that were there at the start join at its time.

    Attributes:
        events: times never fall and are 0 or more; a node goes only if it came.
    """

    events: tuple[TraceEvent, ...]

    @property
    def duration_s(self) -> float:
        return self.events[-1].time_s if self.events else 0.0

    def compressed(self, factor: float) -> Trace:
        """The same, ``factor`` times as fast.

        Raises:
            BadInput: if ``factor`` is no number above 0.
        """
        if not (factor > 0 and math.isfinite(factor)):
            raise BadInput("factor", factor, "use a number above 0")
        return Trace(tuple(event._replace(time_s=event.time_s / factor) for event in self.events))

    def capacity(self) -> list[tuple[float, int]]:
        """(time_s, nodes that are there from then on), an entry for each time at which something happened."""
        found: dict[float, int] = {}
        nodes = 0
        for event in self.events:
            nodes += 1 if event.joins else -1
            found[event.time_s] = nodes
        return list(found.items())


def read_trace(path: str | Path, *, unit_s: float | None = None, seed: int = 0) -> Trace:
    """The trace in a file; its format is seen from its first line.

    Args:
        unit_s: seconds of the file's unit of time, if it is not the format's: 3600 for Bamboo's scaled files.
        seed: draws who leaves, where the file does not say it.

    Raises:
        BadInput: naming file, line and field.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("trace", str(path), f"name a file that can be read ({error})") from None
    return parse_trace(text, path.name, unit_s=unit_s, seed=seed)


def parse_trace(
    text: str, name: str = "trace", *, unit_s: float | None = None, seed: int = 0
) -> Trace:
    """As :func:`read_trace`, from the text itself; ``name`` stands for the file in errors."""
    if unit_s is not None and not (unit_s > 0 and math.isfinite(unit_s)):
        raise BadInput("unit_s", unit_s, "use a number above 0")
    first = next((line for line in text.splitlines() if line.strip()), "").strip()
    if not first:
        raise BadInput(name, "", "name a file that is not empty")
    if first.startswith("{"):
        return _read_count_json(text, name, seed)
    if first.count(",") == 1:
        return _read_count_csv(text, name, unit_s or 1.0, seed)
    return _read_node_csv(text, name, unit_s or 0.001)


def _lines(text: str) -> list[tuple[int, str]]:
    return [
        (number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()
    ]


# -- who comes and goes is told -----------------------------------------------------------------------------------


def _read_node_csv(text: str, name: str, unit_s: float) -> Trace:
    events: list[TraceEvent] = []
    present: set[str] = set()
    last_s = 0.0
    for number, line in _lines(text):
        place, parts = f"{name}:{number}", [part.strip() for part in line.split(",")]
        if len(parts) != 3:
            raise BadInput(place, line, "write MILLISECONDS,add,NODE or MILLISECONDS,remove,NODE")
        time, act, node = parts
        if act not in ("add", "remove"):
            raise BadInput(f"{place}.act", act, "use add or remove")
        last_s = _time_s(f"{place}.time", time, unit_s, last_s)
        if not node:
            raise BadInput(f"{place}.node", node, "write a name")
        joins = act == "add"
        if joins == (node in present):
            known = "it is there already" if joins else "it is not there"
            raise BadInput(f"{place}.node", node, f"name another, or mend a line before: {known}")
        present ^= {node}
        events.append(TraceEvent(last_s, node, joins))
    return Trace(tuple(events))


# -- only how many is told ----------------------------------------------------------------------------------------


def _read_count_csv(text: str, name: str, unit_s: float, seed: int) -> Trace:
    crowd, last_s = _Crowd(seed), 0.0
    for number, line in _lines(text):
        place, parts = f"{name}:{number}", line.split(",")
        if len(parts) != 2:
            raise BadInput(place, line, "write TIME,NODES")
        last_s = _time_s(f"{place}.time", parts[0], unit_s, last_s)
        crowd.become(_count(f"{place}.nodes", parts[1]), last_s)
    return Trace(tuple(crowd.events))


def _read_count_json(text: str, name: str, seed: int) -> Trace:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise BadInput(name, text[:40], f"write one JSON object ({error})") from None
    metadata, data = found.get("metadata"), found.get("data")
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not gap_s > 0:
        raise BadInput(f"{name}:metadata.gap_seconds", gap_s, "use a number of seconds above 0")
    if not isinstance(data, list):
        raise BadInput(f"{name}:data", data, "write a list: the number of nodes in each interval")
    crowd = _Crowd(seed)
    for index, nodes in enumerate(data):
        crowd.become(_count(f"{name}:data[{index}]", nodes), index * float(gap_s))
    return Trace(tuple(crowd.events))


class _Crowd:
    """Gives names to nodes of which only the number is known."""

    def __init__(self, seed: int) -> None:
        self.events: list[TraceEvent] = []
        self._present: list[str] = []
        self._named = 0
        self._random = random.Random(seed)

    def become(self, nodes: int, time_s: float) -> None:
        while len(self._present) < nodes:
            self._present.append(f"node{self._named}")
            self._named += 1
            self.events.append(TraceEvent(time_s, self._present[-1], True))
        while len(self._present) > nodes:
            gone = self._present.pop(self._random.randrange(len(self._present)))
            self.events.append(TraceEvent(time_s, gone, False))


# -- single fields ------------------------------------------------------------------------------------------------


def _time_s(field: str, value: Any, unit_s: float, last_s: float) -> float:
    try:
        time_s = float(value) * unit_s
    except (TypeError, ValueError):
        raise BadInput(field, value, "use a number") from None
    if not (0 <= time_s < math.inf):
        raise BadInput(field, value, "use a number, 0 or more")
    if time_s < last_s:
        raise BadInput(field, value, "put the lines in the order of their times")
    return time_s


def _count(field: str, value: Any) -> int:
    try:
        nodes = float(value)
    except (TypeError, ValueError):
        raise BadInput(field, value, "use a whole number of nodes, 0 or more") from None
    if not 0 <= nodes < 1_000_000 or nodes != int(nodes):
        raise BadInput(field, value, "use a whole number of nodes, 0 or more")
    return int(nodes)
