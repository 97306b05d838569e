"""The progress of a second job: the steps that its log has shown, and why it will show no more.

-> attach/twin/run.py asks again and again. attach/jobs/places.py: the pods of a job.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaoskit.attach.jobs.job_state import FAILED
from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.places import JobPlaces, Place
from chaoskit.attach.logs.records import ContainerLine, LogHole
from chaoskit.stacks.course import Course, Usual, went_back
from chaoskit.stacks.log import CommandLogLine, LogReader
from chaoskit.stacks.patterns import LogPatterns

#: A container or pod that has ended with an error so often is in a crash loop. Fewer ends may be
#: those of pods that did not start together.
_CRASHES_MIN = 3
#: Seconds that the lines of a pod may arrive later than those of another one.
_LATE_LINES_S = 5.0


@dataclass(frozen=True, slots=True)
class StepGoal:
    """The steps that a second job must show.

    Attributes:
        first: the first step to compare. The log must begin with it, or before.
        last: the last step to compare.
        target: the step up to which it trains; the last one, or a later one.
        printing_nodes: number of the pods whose logs show steps.
    """

    first: int
    last: int
    target: int
    printing_nodes: int


class TwinLog:
    """The lines of a second job that show a step or a loss, and the holes of its log. Thread-safe.

    Args:
        watch: the patterns of steps and losses.
    """

    def __init__(self, watch: LogPatterns) -> None:
        self._reader, self._lock = LogReader(watch), threading.Lock()
        self._lines: list[CommandLogLine] = []
        self._holes: dict[str, LogHole] = {}
        self._highest: dict[str, int] = {}  # by node
        self._reached_ns: dict[int, int] = {}  # first time at which a pod has shown a step or more

    def receive(self, node: str, record: ContainerLine | LogHole) -> None:
        """Take the next line or hole of a node."""
        with self._lock:
            if isinstance(record, LogHole):
                self._holes.setdefault(node, record)
                return
            lines = self._reader.feed(node, record.content + b"\n", record.t_ns)
            self._lines += lines
            for line in lines:
                if line.step is not None:
                    self._highest[node] = max(line.step, self._highest.get(node, line.step))

    def has_shown(self, goal: StepGoal, now_ns: int) -> bool:
        """Return whether all pods that print have shown the target, and no line of it is under way."""
        with self._lock:
            steps = list(self._highest.values())
        if not steps or max(steps) < goal.target:
            return False
        reached_ns = self._reached_ns.setdefault(goal.target, now_ns)
        is_whole = len(steps) >= goal.printing_nodes and min(steps) >= goal.target
        return is_whole or now_ns - reached_ns >= _LATE_LINES_S * 1e9

    def why_unusable(self, goal: StepGoal) -> str:
        """Return why nothing can be compared with what was shown so far; "" if it can be."""
        with self._lock:
            lines, holes = list(self._lines), {**self._holes}
        steps = [line.step for line in lines if line.step is not None]
        if not steps:
            return f"its log shows no step ({self._reader.lines} lines)"
        if max(steps) < goal.last:
            return f"its log ends with step {max(steps)}, before step {goal.last}"
        if min(steps) > goal.first:
            return (
                f"its log begins with step {min(steps)}, after step {goal.first} of the job: let it train "
                "from its beginning, with directories of its own for checkpoints"
            )
        if (step_back := went_back(lines)) is not None:
            node, highest, step = step_back
            return f"it was disturbed without a fault: its log on {node} goes back from step {highest} to step {step}"
        printing = {line.node for line in lines if line.step is not None}
        reasons = [f"{node}: {hole.reason}" for node, hole in holes.items() if node in printing]
        return f"lines of its log may be missing: {reasons[0]}" if reasons else ""

    def shown(self) -> tuple[dict[int, int], dict[int, tuple[float, ...]]]:
        """Return how often each step was shown, and the different losses of each step.

        Steps after the last one that all pods have shown are left out.
        """
        with self._lock:
            last = min(self._highest.values(), default=-1)
            lines = list(self._lines)
        counts = Counter(line.step for line in lines if line.step is not None)
        losses = Course(lines, Usual(counts)).losses()
        return (
            {step: count for step, count in sorted(counts.items()) if step <= last},
            {step: of_step for step, of_step in losses.items() if step <= last},
        )


def why_failed(places: JobPlaces, containers: Mapping[PlaceKey, str]) -> str:
    """Return why a second job will show no more steps; "" if it may.

    Args:
        places: its places.
        containers: name of the container that trains, by place.
    """
    if places.job is not None and places.job.outcome == FAILED:
        why = ", ".join(filter(None, (places.job.reason, places.job.message)))
        return f"it has failed ({why})" if why else "it has failed"
    reasons = (_why_crashing(place, containers.get(place.key, "")) for place in places.places)
    return next(filter(None, reasons), "")


def _why_crashing(place: Place, container: str) -> str:
    """Return in words that the container of a place ends with an error again and again, or ""."""
    pods = [*place.former_pods, *([place.pod] if place.pod is not None else [])]
    states = [pod.container(container) for pod in pods]
    crash_count = sum(state.restart_count for state in states)
    crash_count += sum(bool(state.exit_code) for state in states)
    codes: Sequence[int] = [
        code for state in states for code in (state.last_exit_code, state.exit_code) if code
    ]
    if crash_count < _CRASHES_MIN or not codes:
        return ""
    return f"container {container} at {place.key} has ended {crash_count} times, the last time with exit code {codes[-1]}"
