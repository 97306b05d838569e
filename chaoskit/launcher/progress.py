"""Progress of a run for its view, as pure state.

It is updated with messages of the coordinator, or with lines of a command's log.

-> ``launcher/view.py`` draws it. ``report/``: the results of a run, computed from its journals.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chaoskit.experiment.injection.command_follower import FaultStruck, LogRead
from chaoskit.experiment.run.storing import Storing
from chaoskit.launcher.outage import NodesLost
from chaoskit.plaintext import plural
from chaoskit.report.summary import duration, number
from chaoskit.vocabulary import EXITED
from chaoskit.wire.messages import (
    AtHook,
    Beat,
    EndJob,
    Halt,
    Heartbeat,
    Plan,
    RuleFired,
    Welcome,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
    WorldSize,
)

_RATE_WINDOW_S = 10.0
_SAME_LOSS_SHOWN = 3  # a script that fails on every rank again and again is reported this often


@dataclass(frozen=True, slots=True)
class ViewLine:
    """A line about an event. ``kind`` is info, bad or good."""

    at_s: float  # since the start of the run
    kind: str
    text: str


@dataclass(slots=True)
class OpenIncident:
    """Losses of ranks, until a step is committed after them.

    Attributes:
        step: the newest step that may have been committed before the loss. Heartbeats lag behind,
            so the first one of each member of the new generation also counts as before.
    """

    since_s: float
    step: int
    generation: int = 0  # the generation that trains on; 0 while there is none
    reported: set[str] = field(default_factory=set)

    def begin(self, generation: int, step: int) -> None:
        """Begin with another generation, after the loss or the failure of the one before."""
        self.generation, self.step = generation, step
        self.reported.clear()

    def ended_by(self, beat: Beat) -> bool:
        """Return True if a beat of the new generation proves a commit after the loss.

        The first beat of each worker proves none; its step counts as committed before.
        """
        if beat.worker in self.reported:
            return beat.step > self.step
        self.reported.add(beat.worker)
        self.step = max(self.step, beat.step)
        return False


class Progress:
    """The progress of one run.

    Args:
        steps: the number of steps of the job; None if it is not known.
        faults: the planned faults in words, by number.

    Attributes:
        step: the number of committed steps; of a command, the highest step in its log.
        resumed_from: the step of the stored snapshot that the run began with; 0 for none.
        loss: the newest reported loss; NaN while there is none.
        recoveries: seconds from each loss to the next committed step, with the precision of a
            heartbeat.
        error: the last error that a worker reported; empty if there was none.
        culprit: the worker that reported it, or that was lost last if none did; empty before.
        running: the number of nodes on which a command still runs; None for a job.
        end: the end of the job; None before.
    """

    def __init__(
        self, now_s: float, *, steps: int | None = None, faults: Sequence[str] = ()
    ) -> None:
        self.steps, self._faults = steps, faults
        self.started_s = now_s
        self.training_since_s: float | None = None
        self.end: EndJob | None = None
        self.resumed_from = 0
        self.nodes = self.spares_wanted = 0
        self.plan: Plan | None = None
        self.running: int | None = None  # nodes on which a command still runs; None for a job
        self.beats: dict[str, Beat] = {}
        self.ready: set[str] = set()
        self.done: set[str] = set()
        self.step, self.loss = 0, math.nan
        self.recoveries: list[float] = []
        self.incident: OpenIncident | None = None
        self.error = self.culprit = self.weights_digest = ""
        self._below_full_size: OpenIncident | None = (
            None  # since the world became smaller than it should be
        )
        self._struck_faults: set[str] = set()
        self._losses_shown: Counter[str] = (
            Counter()
        )  # losses by their text, since the last committed step
        self._steps: deque[tuple[float, int]] = deque()

    @property
    def world(self) -> int:
        """The number of ranks in the current generation."""
        return len(self.plan.members) if self.plan else 0

    @property
    def generation(self) -> int:
        """The number of the current generation; 0 before the first."""
        return self.plan.generation if self.plan else 0

    @property
    def spares(self) -> int:
        """The number of warm workers without a rank."""
        members = {member.worker for member in self.plan.members} if self.plan else set()
        return len(self.ready - members)

    def elapsed_s(self, now_s: float) -> float:
        """Return the seconds since the start of the run."""
        return now_s - self.started_s

    def training_s(self, now_s: float) -> float:
        """Return the seconds since the first generation; 0 before it.

        They count from the first step in the log if the run is that of a command.
        """
        return now_s - (self.training_since_s or now_s)

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the rate of the last ten seconds, or of the last two steps if they took longer.

        None is returned before two steps were seen.
        """
        while len(self._steps) > 2 and self._steps[1][0] < now_s - _RATE_WINDOW_S:
            self._steps.popleft()
        if len(self._steps) < 2:
            return None
        (first_s, first), (last_s, last) = self._steps[0], self._steps[-1]
        return (last - first) / max(now_s - first_s if self.end is None else last_s - first_s, 1e-3)

    def handle(self, message: Any, now_s: float) -> list[ViewLine]:
        """Update the progress from a message, and return the lines to show; none for most."""
        texts = self._process(message, now_s)
        return [ViewLine(self.elapsed_s(now_s), kind, text) for kind, text in texts]

    def _process(self, message: Any, now_s: float) -> list[tuple[str, str]]:
        """Update the progress from a message, and return kind and text of each line.

        The methods that handle one kind of message return the same.
        """
        match message:
            case Welcome(config):
                self.nodes, self.spares_wanted = config.nodes, config.spares
            case WorldSize():
                return self._resize(message)
            case WorkerReady(worker):
                self.ready.add(worker)
            case Heartbeat(_, beats):
                return self._heartbeat(beats, now_s)
            case Plan():
                return self._regroup(message, now_s)
            case RuleFired():
                return self._on_rule_fired(message)
            case WorkerLost():
                return self._on_worker_lost(message, now_s)
            case WorkerFailed(worker, error):
                self.culprit, self.error = worker, error
            case AtHook(fault=fault) | FaultStruck(fault):
                return self._on_fault(fault)
            case LogRead():
                self._on_log(message, now_s)
            case WorkerDone(worker, step, digest):
                self.done.add(worker)
                self.step, self.weights_digest = max(self.step, step), digest
            case EndJob():
                self.end = message
            case Storing(step, tier, target, written_bytes, answers):
                so_far = f", {number(written_bytes / 1e6)} MB so far" if tier == "disk" else ""
                so_far = so_far if answers else ", which does not answer"
                return [("info", f"waiting until step {step} is stored in {target}{so_far}")]
            case NodesLost():
                return [("bad", message.text)]
            case Halt(reason):
                return [
                    ("bad", f"{reason}: the step is finished and stored, then all processes end")
                ]
        return []

    def _on_fault(self, fault: str) -> list[tuple[str, str]]:
        """Return the line of a fault, once for each fault."""
        if fault in self._struck_faults:
            return []  # the replacement of the rank reaches the same trigger, and nothing happens there
        self._struck_faults.add(fault)
        number = int(fault.removeprefix("fault"))
        return [("bad", f"{self._faults[number] if number < len(self._faults) else fault} strikes")]

    def _on_log(self, log_read: LogRead, now_s: float) -> None:
        """Update step and loss from the log of a command. The step is a number, not a count."""
        self.running, self.nodes = log_read.running, log_read.nodes
        if log_read.step is not None and (not self._steps or log_read.step > self.step):
            self.step, self.training_since_s = log_read.step, self.training_since_s or now_s
            self._steps.append((now_s, self.step))
        self.loss = math.nan if log_read.loss is None else log_read.loss

    # -- what happens to the world -----------------------------------------------------------------

    def _regroup(self, plan: Plan, now_s: float) -> list[tuple[str, str]]:
        """Switch to the generation of a plan, and return the line about the change of the world."""
        is_first, world_before, self.plan = self.plan is None, self.world, plan
        world = self.world
        stored = next((copy for copy in plan.restore if copy.path), None)
        if stored is not None:
            self.step = min(self.step, stored.step)  # the steps after it are taken again
        if world < self.nodes and self._below_full_size is None:
            self._below_full_size = OpenIncident(
                self.incident.since_s if self.incident else now_s, self.step
            )
        for incident in filter(None, (self.incident, self._below_full_size)):
            incident.begin(plan.generation, self.step)
        if is_first:
            self.training_since_s = now_s
            if stored is None:
                return [("info", f"{plural(world, 'rank')} train")]
            self.resumed_from = stored.step
            return [
                (
                    "info",
                    f"{plural(world, 'rank')} train, from step {stored.step} on: {stored.path}",
                )
            ]
        if stored is not None:
            change = f"{plural(world, 'rank')} go on from step {stored.step}: {stored.path}"
        elif world > world_before:
            change = f"{plural(world, 'rank')}, {world - world_before} joined"
        elif world < world_before:
            change = f"{plural(world, 'rank')} go on"
        else:
            change = "a spare steps in" if self.incident else "regrouped"
        return [("info", f"generation {plan.generation}: {change}")]

    def _resize(self, message: WorldSize) -> list[tuple[str, str]]:
        """Update the planned size, and return a line if it has changed.

        Workers on other nodes have left, or are about to: they are not ready any more.
        """
        is_changed, self.nodes = message.size != self.nodes, message.size
        gone = {worker for worker in self.ready if worker.rpartition(".")[0] not in message.nodes}
        self.ready -= gone
        if self.world >= self.nodes:
            self._below_full_size = None
        return (
            [("info", f"the world shall have {plural(self.nodes, 'rank')}: {message.reason}")]
            if is_changed
            else []
        )

    def _on_worker_lost(self, lost: WorkerLost, now_s: float) -> list[tuple[str, str]]:
        """Record the loss of a worker, and return its line.

        The same loss has a line a few times only until a step is committed.
        """
        self.ready.discard(lost.worker)
        self.beats.pop(lost.worker, None)
        member = self.plan.member(lost.worker) if self.plan else None
        if lost.cause == "raised":
            self.culprit, self.error = lost.worker, lost.detail
        elif not self.error:
            self.culprit = lost.worker
        if member is not None and self.end is None:
            self.incident = self.incident or OpenIncident(now_s, self.step)
            self.incident.generation = 0
        self._losses_shown[lost.detail] += 1
        if self._losses_shown[lost.detail] > _SAME_LOSS_SHOWN:
            return []
        name = f"rank {member.rank} ({lost.worker})" if member else lost.worker
        suffix = (
            "; further ones are not shown"
            if self._losses_shown[lost.detail] == _SAME_LOSS_SHOWN
            else ""
        )
        is_repeated = lost.cause == "raised" and self._losses_shown[lost.detail] > 1
        return [
            ("bad", f"{name} lost: {'raised the same' if is_repeated else _reason(lost)}{suffix}")
        ]

    def _on_rule_fired(self, fired: RuleFired) -> list[tuple[str, str]]:
        """Return the line of a log rule that fired."""
        kind = "info" if fired.action == "none" else "bad"
        act = "" if fired.action in ("none", "alert") else f" -> {fired.action}"
        return [
            (
                kind,
                f"log rule {fired.rule}, rank {fired.rank}: {fired.verdict}, {fired.reason}{act}",
            )
        ]

    def _heartbeat(self, beats: Sequence[Beat], now_s: float) -> list[tuple[str, str]]:
        """Update the progress with beats, and return lines of recoveries that they prove."""
        self.beats.update((beat.worker, beat) for beat in beats)
        members = [
            beat for beat in beats if self.plan is not None and self.plan.member(beat.worker)
        ]
        for beat in members:
            if beat.step > self.step or (beat.step == self.step > 0 and math.isnan(self.loss)):
                self.step, self.loss = beat.step, beat.loss
        if self.step and (not self._steps or self.step > self._steps[-1][1]):
            self._steps.append((now_s, self.step))
            self._losses_shown.clear()
        return [
            text
            for beat in members
            if beat.generation == self.generation
            for text in self._report_recoveries(beat, now_s)
        ]

    def _report_recoveries(self, beat: Beat, now_s: float) -> list[tuple[str, str]]:
        """Return lines if a beat of the current generation proves a recovery, or full strength.

        A recovery is added to ``recoveries``.
        """
        texts = []
        incident = self.incident
        is_full = self.world == self.nodes
        if incident is not None and incident.generation and incident.ended_by(beat):
            seconds = now_s - incident.since_s
            self.recoveries.append(seconds)
            self.incident = None
            strength = "at full strength" if is_full else f"with {plural(self.world, 'rank')}"
            texts.append(
                (
                    "good",
                    f"step {beat.step} committed, {strength}, {duration(seconds)} after the loss",
                )
            )
            if is_full:
                self._below_full_size = None
        if self._below_full_size is not None and is_full and self._below_full_size.ended_by(beat):
            texts.append(
                (
                    "good",
                    f"full strength again after {duration(now_s - self._below_full_size.since_s)}",
                )
            )
            self._below_full_size = None
        return texts


def _reason(lost: WorkerLost) -> str:
    """Return the reason of a loss in words.

    It is ``killed by SIGKILL`` rather than ``killed: killed by SIGKILL``.
    """
    if lost.cause == EXITED:
        return "its process ended"
    return lost.detail if lost.detail.startswith(lost.cause) else f"{lost.cause}: {lost.detail}"
