"""What an observer of a run knows of it: pure state, fed with what the coordinator, or a command's log, says."""

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
_SAME_LOSS_SHOWN = 3  # a script that fails on every rank, again and again, is told about this often


@dataclass(frozen=True, slots=True)
class ViewLine:
    """Something worth a line. ``kind``: info, bad or good."""

    at_s: float  # since the start of the run
    kind: str
    text: str


@dataclass(slots=True)
class OpenIncident:
    """One or more losses, until a step is committed after them.

    Attributes:
        step: the newest one that may have been committed before; heartbeats lag behind, so the first of each member
            of the new generation still counts as before.
    """

    since_s: float
    step: int
    generation: int = 0  # that trains on; 0 while there is none
    heard: set[str] = field(default_factory=set)

    def begin(self, generation: int, step: int) -> None:
        """Another generation tries."""
        self.generation, self.step = generation, step
        self.heard.clear()

    def ended_by(self, beat: Beat) -> bool:
        """Whether a beat of the new generation proves a commit after the loss."""
        if beat.worker in self.heard:
            return beat.step > self.step
        self.heard.add(beat.worker)
        self.step = max(self.step, beat.step)
        return False


class Progress:
    """Follows one run.

    Args:
        steps: of the job, where they are known.
        faults: the planned faults in words, by number.

    Attributes:
        step: committed steps.
        resumed_from: step of the stored snapshot that the run began with; 0 for none.
        loss: of the newest one that was heard of; NaN while there is none.
        recoveries: seconds from each loss to the next committed step, to a heartbeat's precision.
        error: the last error that a worker reported, ``culprit`` the worker; empty where there was none.
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
        self.running: int | None = None  # nodes on which a command still runs; None of a job
        self.beats: dict[str, Beat] = {}
        self.ready: set[str] = set()
        self.done: set[str] = set()
        self.step, self.loss = 0, math.nan
        self.recoveries: list[float] = []
        self.incident: OpenIncident | None = None
        self.error = self.culprit = self.weights_digest = ""
        self._below_full_size: OpenIncident | None = (
            None  # since the world is smaller than it should be
        )
        self._struck: set[str] = set()
        self._losses_told: Counter[str] = Counter()  # by their words, since the last committed step
        self._steps: deque[tuple[float, int]] = deque()

    @property
    def world(self) -> int:
        """Ranks in the current generation."""
        return len(self.plan.members) if self.plan else 0

    @property
    def generation(self) -> int:
        """Number of the current membership; 0 before the first."""
        return self.plan.generation if self.plan else 0

    @property
    def spares(self) -> int:
        """Warm workers without a rank."""
        members = {member.worker for member in self.plan.members} if self.plan else set()
        return len(self.ready - members)

    def elapsed_s(self, now_s: float) -> float:
        """Since the start of the run."""
        return now_s - self.started_s

    def training_s(self, now_s: float) -> float:
        """Since the first membership."""
        return now_s - (self.training_since_s or now_s)

    def steps_per_s(self, now_s: float) -> float | None:
        """Over the last ten seconds, or the last two steps where those take longer."""
        while len(self._steps) > 2 and self._steps[1][0] < now_s - _RATE_WINDOW_S:
            self._steps.popleft()
        if len(self._steps) < 2:
            return None
        (first_s, first), (last_s, last) = self._steps[0], self._steps[-1]
        return (last - first) / max(now_s - first_s if self.end is None else last_s - first_s, 1e-3)

    def handle(self, message: Any, now_s: float) -> list[ViewLine]:
        """Take in one message; what is worth a line comes back."""
        texts = self._take_in(message, now_s)
        return [ViewLine(self.elapsed_s(now_s), kind, text) for kind, text in texts]

    def _take_in(self, message: Any, now_s: float) -> list[tuple[str, str]]:
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
        if fault in self._struck:
            return []  # the replacement of the rank reaches the same trigger, and nothing happens there
        self._struck.add(fault)
        number = int(fault.removeprefix("fault"))
        return [("bad", f"{self._faults[number] if number < len(self._faults) else fault} strikes")]

    def _on_log(self, shown: LogRead, now_s: float) -> None:
        """What the log of a command shows: the number of a step, not how many there were."""
        self.running, self.nodes = shown.running, shown.nodes
        if shown.step is not None and (not self._steps or shown.step > self.step):
            self.step, self.training_since_s = shown.step, self.training_since_s or now_s
            self._steps.append((now_s, self.step))
        self.loss = math.nan if shown.loss is None else shown.loss

    # -- what happens to the world --------------------------------------------------------------------------------

    def _regroup(self, plan: Plan, now_s: float) -> list[tuple[str, str]]:
        first, before, self.plan = self.plan is None, self.world, plan
        world = self.world
        stored = next((copy for copy in plan.restore if copy.path), None)
        if stored is not None:
            self.step = min(self.step, stored.step)  # the steps after it are taken again
        if world < self.nodes and self._below_full_size is None:
            self._below_full_size = OpenIncident(
                self.incident.since_s if self.incident else now_s, self.step
            )
        for open_one in filter(None, (self.incident, self._below_full_size)):
            open_one.begin(plan.generation, self.step)
        if first:
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
        elif world > before:
            change = f"{plural(world, 'rank')}, {world - before} joined"
        elif world < before:
            change = f"{plural(world, 'rank')} go on"
        else:
            change = "a spare steps in" if self.incident else "regrouped"
        return [("info", f"generation {plan.generation}: {change}")]

    def _resize(self, message: WorldSize) -> list[tuple[str, str]]:
        """What is on other nodes has left, or is about to."""
        changed, self.nodes = message.size != self.nodes, message.size
        gone = {worker for worker in self.ready if worker.rpartition(".")[0] not in message.nodes}
        self.ready -= gone
        if self.world >= self.nodes:
            self._below_full_size = None
        return (
            [("info", f"the world shall have {plural(self.nodes, 'rank')}: {message.reason}")]
            if changed
            else []
        )

    def _on_worker_lost(self, lost: WorkerLost, now_s: float) -> list[tuple[str, str]]:
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
        self._losses_told[lost.detail] += 1
        if self._losses_told[lost.detail] > _SAME_LOSS_SHOWN:
            return []
        name = f"rank {member.rank} ({lost.worker})" if member else lost.worker
        again = (
            "; further ones are not shown"
            if self._losses_told[lost.detail] == _SAME_LOSS_SHOWN
            else ""
        )
        is_repeated = lost.cause == "raised" and self._losses_told[lost.detail] > 1
        return [
            ("bad", f"{name} lost: {'raised the same' if is_repeated else _reason(lost)}{again}")
        ]

    def _on_rule_fired(self, fired: RuleFired) -> list[tuple[str, str]]:
        kind = "info" if fired.action == "none" else "bad"
        act = "" if fired.action in ("none", "alert") else f" -> {fired.action}"
        return [
            (
                kind,
                f"log rule {fired.rule}, rank {fired.rank}: {fired.verdict}, {fired.reason}{act}",
            )
        ]

    def _heartbeat(self, beats: Sequence[Beat], now_s: float) -> list[tuple[str, str]]:
        self.beats.update((beat.worker, beat) for beat in beats)
        members = [
            beat for beat in beats if self.plan is not None and self.plan.member(beat.worker)
        ]
        for beat in members:
            if beat.step > self.step or (beat.step == self.step > 0 and math.isnan(self.loss)):
                self.step, self.loss = beat.step, beat.loss
        if self.step and (not self._steps or self.step > self._steps[-1][1]):
            self._steps.append((now_s, self.step))
            self._losses_told.clear()
        return [
            text
            for beat in members
            if beat.generation == self.generation
            for text in self._commits_shown_by(beat, now_s)
        ]

    def _commits_shown_by(self, beat: Beat, now_s: float) -> list[tuple[str, str]]:
        """A beat of the current generation shows whether training goes on, and whether at full strength."""
        texts = []
        incident = self.incident
        full = self.world == self.nodes
        if incident is not None and incident.generation and incident.ended_by(beat):
            seconds = now_s - incident.since_s
            self.recoveries.append(seconds)
            self.incident = None
            strength = "at full strength" if full else f"with {plural(self.world, 'rank')}"
            texts.append(
                (
                    "good",
                    f"step {beat.step} committed, {strength}, {duration(seconds)} after the loss",
                )
            )
            if full:
                self._below_full_size = None
        if self._below_full_size is not None and full and self._below_full_size.ended_by(beat):
            texts.append(
                (
                    "good",
                    f"full strength again after {duration(now_s - self._below_full_size.since_s)}",
                )
            )
            self._below_full_size = None
        return texts


def _reason(lost: WorkerLost) -> str:
    """``killed by SIGKILL`` rather than ``killed: killed by SIGKILL``."""
    if lost.cause == EXITED:
        return "its process ended"
    return lost.detail if lost.detail.startswith(lost.cause) else f"{lost.cause}: {lost.detail}"
