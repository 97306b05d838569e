"""One run as its journals tell it, kept current while it goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaoskit.errors import BadInput
from chaoskit.journal import JournalTail, Record
from chaoskit.observe.notes import Note, note_of, note_of_return
from chaoskit.process.linux import start_ticks
from chaoskit.runlog.account import UNHEARD, Accountant
from chaoskit.runlog.account.setback import Setback
from chaoskit.runlog.account.time_account import Recently, TimeAccount
from chaoskit.runlog.outcome import CopyInterval
from chaoskit.runlog.torn import interval_of
from chaoskit.vocabulary import Event

_HOLD_NS = (
    100_000_000  # what is younger may still be overtaken by an older record of another process
)
_NOTES_KEPT = 200
_LOSSES_KEPT = 512

#: Of which nothing is shown. They are most of the bytes: each names the samples of a step.
_LEFT_OUT = UNHEARD - {
    Event.WORKER_STARTED,
    Event.WORKER_EXITED,
    Event.NODE_LOST,
    Event.SAVED,
    Event.SAVE_FAILED,
    Event.SEALED,
    Event.COPY_INTERVAL,
    Event.SET_ASIDE,
    Event.LEFT_OUT,
    Event.RETURNED,
    Event.RESUMED,
    Event.RECORD_LOST,
    Event.EVICTED,
    Event.RULE_FIRED,
    Event.CONNECTIONS_REFUSED,
    Event.HANG_LIMITS,
}


@dataclass(slots=True)
class Stored:
    """The newest copy of the state that is known to be complete, in one tier."""

    step: int
    t_ns: int


@dataclass(slots=True)
class Place:
    """A worker: where it runs, and its rank if it has one."""

    node: str
    pid: int
    rank: int | None = None
    alive: bool = True
    step: int = -1  # it committed last


class Follower:
    """Reads a run's journals as they grow.

    Args:
        directory: of the run.
        on_step, on_setback: see :class:`Accountant`.

    Attributes:
        started: what the harness said at the start of the run; None in a run of an older version.
        workers: by name; of those that ended, the ones that had a rank last.
        stored: tier -> its newest copy.
        copies: how much work lies between two copies of a replicated state; None before the first.
        losses: step and loss of the newest commits.
        notes: what happened, the newest last.
        hang_limits: the newest record of them; None while they are not known.
        last_ns: time of the newest record.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_step: Callable[[int], None] = lambda spent_ns: None,
        on_setback: Callable[[Setback], None] = lambda setback: None,
    ) -> None:
        self._tail = JournalTail(directory / "journal", without=_LEFT_OUT)
        self._on_setback = on_setback
        self._held: list[Record] = []
        self.accountant = Accountant(on_step=on_step, on_setback=self._came_back)
        self.started: Record | None = None
        self.workers: dict[str, Place] = {}
        self.nodes: set[str] = set()
        self.away: dict[str, str] = {}  # node -> why it takes no part
        self.stored: dict[str, Stored] = {}
        self.copies: CopyInterval | None = None
        self.losses: deque[tuple[int, float | None]] = deque(maxlen=_LOSSES_KEPT)
        self.notes: deque[Note] = deque(maxlen=_NOTES_KEPT)
        self.hang_limits: Record | None = None
        self.end: Record | None = None
        self.last_ns = 0

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, well or not, or its launcher is gone."""
        if self.end is not None:
            return True
        return (
            self.started is not None and start_ticks(self.started["pid"]) != self.started["ticks"]
        )

    def poll(self) -> None:
        """Read what is new."""
        self._held = sorted([*self._held, *self._tail.poll()], key=lambda record: record.t_ns)
        limit_ns = time.monotonic_ns() - _HOLD_NS
        ripe = [record for record in self._held if record.t_ns <= limit_ns]
        self._held = self._held[len(ripe) :]
        self._take_in(ripe)

    def finish(self) -> None:
        """Read all that is left: nobody writes any more."""
        self._held = sorted([*self._held, *self._tail.poll()], key=lambda record: record.t_ns)
        self._take_in(self._held)
        self._held = []

    def account(self) -> TimeAccount:
        """Up to now; of a run that is over, up to its end."""
        return self.accountant.account(self._now_ns())

    def recently(self, window_s: float) -> Recently:
        """The ratios of the last ``window_s`` seconds, an hour at most; of a run that is over, before its end."""
        return self.accountant.recently(window_s, self._now_ns())

    def _now_ns(self) -> int:
        return self.last_ns if self.is_over else time.monotonic_ns()

    def _take_in(self, records: list[Record]) -> None:
        for record in records:
            self.last_ns = max(self.last_ns, record.t_ns)
            self.accountant.take_in(record)
            self._keep(record)
            if note := note_of(record):
                self.notes.append(note)

    def _came_back(self, setback: Setback) -> None:
        self.notes.append(note_of_return(setback))
        self._on_setback(setback)

    def _keep(self, record: Record) -> None:
        match record.event:
            case Event.COMMIT:
                if record.source in self.workers:
                    self.workers[record.source].step = record["step"]
                if not self.losses or record["step"] > self.losses[-1][0]:
                    self.losses.append((record["step"], record["loss"]))
            case Event.STARTED:
                self.started = record
            case Event.WORKER_STARTED:
                self.workers[record["worker"]] = Place(record.source, record["pid"])
                self.nodes.add(record.source)
                self.away.pop(record.source, None)
            case Event.WORKER_EXITED:
                self._forget(record["worker"])
            case Event.DETECTED:
                if record["worker"] in self.workers:
                    self.workers[record["worker"]].alive = False
            case Event.PLAN:
                self._place(record)
            case Event.SAVED:
                self._store(record["tier"], record["step"], record.t_ns)
            case Event.PROTECTED | Event.SEALED:
                self._store(
                    "peer" if record.event == Event.PROTECTED else "memory",
                    record["step"],
                    record.t_ns,
                )
            case Event.COPY_INTERVAL:
                self.copies = interval_of(record)
            case Event.NODE_LOST | Event.SET_ASIDE:
                self.away[record["node"]] = (
                    "lost" if record.event == Event.NODE_LOST else "set aside"
                )
            case Event.LEFT_OUT:
                self.away |= dict.fromkeys(record["nodes"], "cut off")
            case Event.RETURNED:
                self.away = {
                    node: why for node, why in self.away.items() if node not in record["nodes"]
                }
            case Event.HANG_LIMITS:
                self.hang_limits = record
            case Event.JOB_ENDED:
                self.end = record

    def _place(self, plan: Record) -> None:
        """Who has which rank now."""
        ranks = {member["worker"]: member for member in plan["members"]}
        self.workers = {
            name: place for name, place in self.workers.items() if place.alive or name in ranks
        }
        for name, place in self.workers.items():
            place.rank = ranks[name]["rank"] if name in ranks else None
        self.nodes |= {member["node"] for member in plan["members"]}

    def _forget(self, worker: str) -> None:
        place = self.workers.get(worker)
        if place is not None:
            place.alive = False
            if place.rank is None:
                del self.workers[worker]

    def _store(self, tier: str, step: int, t_ns: int) -> None:
        known = self.stored.get(tier)
        if step >= 0 and (known is None or step >= known.step):
            self.stored[tier] = Stored(step, t_ns)


def newest_run(directory: Path | None) -> Path:
    """``directory``, or the newest run below ``chaoskit-runs`` and here.

    Raises:
        BadInput: if it holds no run.
    """
    if directory is not None:
        if not (directory / "journal").is_dir():
            raise BadInput(
                "run_dir", str(directory), "name the directory of a run: it holds a folder journal"
            )
        return directory
    found = [path.parent for path in Path("chaoskit-runs").glob("**/journal") if path.is_dir()]
    if not found:
        raise BadInput(
            "run_dir", None, "name the directory of a run: there is none below ./chaoskit-runs"
        )
    return max(found, key=lambda path: (path / "journal").stat().st_mtime)
