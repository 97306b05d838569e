"""Published traces of spot machines: the times at which nodes came and went.

| format | content of a file | published with | |---|---|---| | ``node-csv`` | lines
``MILLISECONDS,add\\|remove,NODE`` | Oobleck (SOSP 2023), its simulator's traces | | ``count-csv`` |
lines ``SECONDS,NODES``, in "scaled" files ``HOURS,NODES`` | Bamboo (NSDI 2023) | | ``count-json`` |
``{"metadata": {"gap_seconds": S}, "data": [NODES, ...]}`` | SkyPilot's spot traces (NSDI 2024) |

    trace = read_trace(path).compressed(3600)             # an hour becomes a second
    for event in trace.events: ...                        # (time_s, node, joins)

If a file has counts only, arriving nodes get new names, and a seed draws the nodes that leave.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

from chaoskit.errors import BadInput
from chaoskit.settings_file import parse_json


class TraceEvent(NamedTuple):
    """Arrival of a node, or its departure; ``joins`` is True for an arrival."""

    time_s: float
    node: str
    joins: bool


class Trace(NamedTuple):
    """Events in the order of their times. Nodes that exist at the start join at its time.

    Attributes:
        events: the events; times never fall and are 0 or more, and a node leaves only after it
            came.
    """

    events: tuple[TraceEvent, ...]

    @property
    def duration_s(self) -> float:
        """The time of the last event; 0 without events."""
        return self.events[-1].time_s if self.events else 0.0

    def compressed(self, factor: float) -> Trace:
        """Return the same trace, ``factor`` times as fast: all times are divided by ``factor``.

        Raises:
            BadInput: unless ``factor`` is a finite number above 0.
        """
        if not (factor > 0 and math.isfinite(factor)):
            raise BadInput("factor", factor, "use a number above 0")
        return Trace(tuple(event._replace(time_s=event.time_s / factor) for event in self.events))

    def capacity(self) -> list[tuple[float, int]]:
        """Return (time_s, nodes that exist from then on) for each time that has an event."""
        counts: dict[float, int] = {}
        nodes = 0
        for event in self.events:
            nodes += 1 if event.joins else -1
            counts[event.time_s] = nodes
        return list(counts.items())


def read_trace(path: str | Path, *, unit_s: float | None = None, seed: int = 0) -> Trace:
    """Return the trace in a file; its format is recognized by its first line.

    Args:
        unit_s: seconds of the file's unit of time, if it is not the format's: 3600 for Bamboo's
            scaled files. Ignored for JSON, which has its own.
        seed: seed that draws the nodes that leave, if the file has counts only; else ignored.

    Raises:
        BadInput: if the file cannot be read or is wrong, naming line and field; or for ``unit_s``.
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
    """Return the trace in a text, as :func:`read_trace` does for a file.

    ``name`` stands for the file in errors.

    Raises:
        BadInput: as :func:`read_trace`.
    """
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


# -- files that name the nodes ---------------------------------------------------------------------


def _read_node_csv(text: str, name: str, unit_s: float) -> Trace:
    events: list[TraceEvent] = []
    present_nodes: set[str] = set()
    last_s = 0.0
    for number, line in _lines(text):
        place, parts = f"{name}:{number}", [part.strip() for part in line.split(",")]
        if len(parts) != 3:
            raise BadInput(place, line, "write MILLISECONDS,add,NODE or MILLISECONDS,remove,NODE")
        time, action, node = parts
        if action not in ("add", "remove"):
            raise BadInput(f"{place}.act", action, "use add or remove")
        last_s = _time_s(f"{place}.time", time, unit_s, last_s)
        if not node:
            raise BadInput(f"{place}.node", node, "write a name")
        joins = action == "add"
        if joins == (node in present_nodes):
            problem = "it is there already" if joins else "it is not there"
            raise BadInput(f"{place}.node", node, f"name another, or mend a line before: {problem}")
        present_nodes ^= {node}
        events.append(TraceEvent(last_s, node, joins))
    return Trace(tuple(events))


# -- files with counts only ------------------------------------------------------------------------


def _read_count_csv(text: str, name: str, unit_s: float, seed: int) -> Trace:
    named_nodes, last_s = _NamedNodes(seed), 0.0
    for number, line in _lines(text):
        place, parts = f"{name}:{number}", line.split(",")
        if len(parts) != 2:
            raise BadInput(place, line, "write TIME,NODES")
        last_s = _time_s(f"{place}.time", parts[0], unit_s, last_s)
        named_nodes.resize(_count(f"{place}.nodes", parts[1]), last_s)
    return Trace(tuple(named_nodes.events))


def _read_count_json(text: str, name: str, seed: int) -> Trace:
    try:
        content = parse_json(text)
    except ValueError as error:
        raise BadInput(name, text[:40], f"write one JSON object ({error})") from None
    metadata, data = content.get("metadata"), content.get("data")
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not gap_s > 0:
        raise BadInput(f"{name}:metadata.gap_seconds", gap_s, "use a number of seconds above 0")
    if not isinstance(data, list):
        raise BadInput(f"{name}:data", data, "write a list: the number of nodes in each interval")
    named_nodes = _NamedNodes(seed)
    for index, nodes in enumerate(data):
        named_nodes.resize(_count(f"{name}:data[{index}]", nodes), index * float(gap_s))
    return Trace(tuple(named_nodes.events))


class _NamedNodes:
    """Nodes with made-up names, for a trace that has only their number."""

    def __init__(self, seed: int) -> None:
        self.events: list[TraceEvent] = []
        self._present: list[str] = []
        self._named = 0
        self._random = random.Random(seed)

    def resize(self, nodes: int, time_s: float) -> None:
        """Add arrivals or departures at ``time_s`` until there are ``nodes`` nodes."""
        while len(self._present) < nodes:
            self._present.append(f"node{self._named}")
            self._named += 1
            self.events.append(TraceEvent(time_s, self._present[-1], True))
        while len(self._present) > nodes:
            left_node = self._present.pop(self._random.randrange(len(self._present)))
            self.events.append(TraceEvent(time_s, left_node, False))


# -- fields ----------------------------------------------------------------------------------------


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
