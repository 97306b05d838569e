"""State of one run as its journals describe it, kept current while it goes on.

-> runlog/account/accountant.py: time that is productive or lost. observe/live.py: heartbeats.
-> observe/frame.py makes a picture of this state; observe/metrics.py serves it.
"""

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
    100_000_000  # younger records may still be overtaken by an older record of another process
)
_NOTES_KEPT = 200
_LOSSES_KEPT = 512

#: Events that are not shown. They are most of the bytes: each names the samples of a step.
_IGNORED_EVENTS = UNHEARD - {
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
class NewestCopy:
    """The newest copy of the state that is known to be complete, in one tier.

    Attributes:
        t_ns: the time of the record that reports it, on CLOCK_MONOTONIC.
    """

    step: int
    t_ns: int


@dataclass(slots=True)
class WorkerPlace:
    """The place of a worker: its node, its process, and its rank if it has one.

    Attributes:
        rank: its rank; None for a spare.
        alive: False once its loss was detected or its process has ended.
        step: the last step that it committed; -1 before the first.
    """

    node: str
    pid: int
    rank: int | None = None
    alive: bool = True
    step: int = -1


class Follower:
    """A reader of a run's journals, which reads them as they grow.

    Args:
        directory: the directory of the run.
        on_step: see :class:`Accountant`.
        on_setback: see :class:`Accountant`.

    Attributes:
        started: the harness's record of the start; None for runs of an older version.
        accountant: the time account of the run.
        workers: the workers by name. Of those that ended, only the ones with a rank in the newest
            plan are kept.
        nodes: the names of all nodes that were seen.
        away: the nodes that take no part, each with the reason.
        stored: the newest copy in each tier, such as memory, peer or disk.
        copies: how much work lies between two copies of a replicated state; None before the first.
        losses: step and loss of the newest 512 steps; the loss is None if the step has none.
        notes: notes about the newest 200 events, the newest last.
        hang_limits: the newest record of the hang limits; None until there is one.
        end: the record of the job's end; None until there is one.
        last_ns: the time of the newest record on CLOCK_MONOTONIC; 0 before the first.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_step: Callable[[int], None] = lambda spent_ns: None,
        on_setback: Callable[[Setback], None] = lambda setback: None,
    ) -> None:
        self._tail = JournalTail(directory / "journal", without=_IGNORED_EVENTS)
        self._on_setback = on_setback
        self._young_records: list[Record] = []
        self.accountant = Accountant(on_step=on_step, on_setback=self._note_return)
        self.started: Record | None = None
        self.workers: dict[str, WorkerPlace] = {}
        self.nodes: set[str] = set()
        self.away: dict[str, str] = {}  # node -> why it takes no part
        self.stored: dict[str, NewestCopy] = {}
        self.copies: CopyInterval | None = None
        self.losses: deque[tuple[int, float | None]] = deque(maxlen=_LOSSES_KEPT)
        self.notes: deque[Note] = deque(maxlen=_NOTES_KEPT)
        self.hang_limits: Record | None = None
        self.end: Record | None = None
        self.last_ns = 0

    @property
    def is_over(self) -> bool:
        """True if the job has ended, well or not, or its launcher is gone.

        It is False before the first record, and for an older version without a record of the end.
        """
        if self.end is not None:
            return True
        return (
            self.started is not None and start_ticks(self.started["pid"]) != self.started["ticks"]
        )

    def poll(self) -> None:
        """Read the new records, and update the state.

        Records of the last 0.1 s wait for the next call, as an older record of another process may
        follow.
        """
        self._young_records = sorted(
            [*self._young_records, *self._tail.poll()], key=lambda record: record.t_ns
        )
        limit_ns = time.monotonic_ns() - _HOLD_NS
        settled = [record for record in self._young_records if record.t_ns <= limit_ns]
        self._young_records = self._young_records[len(settled) :]
        self._take_in(settled)

    def finish(self) -> None:
        """Read all remaining records. Call it when no process writes any more."""
        self._young_records = sorted(
            [*self._young_records, *self._tail.poll()], key=lambda record: record.t_ns
        )
        self._take_in(self._young_records)
        self._young_records = []

    def account(self) -> TimeAccount:
        """Return the account of the time up to now, or up to the end of the run."""
        return self.accountant.account(self._now_ns())

    def recently(self, window_s: float) -> Recently:
        """Return the ratios of the last ``window_s`` seconds, at most an hour.

        The window ends now, or at the end of the run.
        """
        return self.accountant.recently(window_s, self._now_ns())

    def _now_ns(self) -> int:
        """Return the present time, or the time of the newest record of a run that is over."""
        return self.last_ns if self.is_over else time.monotonic_ns()

    def _take_in(self, records: list[Record]) -> None:
        """Apply records to the time account, the state and the notes.

        Args:
            records: the records, in the order of their times.
        """
        for record in records:
            self.last_ns = max(self.last_ns, record.t_ns)
            self.accountant.take_in(record)
            self._apply(record)
            if note := note_of(record):
                self.notes.append(note)

    def _note_return(self, setback: Setback) -> None:
        """Add a note that training goes on after a setback, and call ``on_setback``.

        A setback is a recovery or a planned resize.
        """
        self.notes.append(note_of_return(setback))
        self._on_setback(setback)

    def _apply(self, record: Record) -> None:
        """Apply a record to the state of the run."""
        match record.event:
            case Event.COMMIT:
                if record.source in self.workers:
                    self.workers[record.source].step = record["step"]
                if not self.losses or record["step"] > self.losses[-1][0]:
                    self.losses.append((record["step"], record["loss"]))
            case Event.STARTED:
                self.started = record
            case Event.WORKER_STARTED:
                self.workers[record["worker"]] = WorkerPlace(record.source, record["pid"])
                self.nodes.add(record.source)
                self.away.pop(record.source, None)
            case Event.WORKER_EXITED:
                self._mark_ended(record["worker"])
            case Event.DETECTED:
                if record["worker"] in self.workers:
                    self.workers[record["worker"]].alive = False
            case Event.PLAN:
                self._assign_ranks(record)
            case Event.SAVED:
                self._note_copy(record["tier"], record["step"], record.t_ns)
            case Event.PROTECTED | Event.SEALED:
                self._note_copy(
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
                    node: reason
                    for node, reason in self.away.items()
                    if node not in record["nodes"]
                }
            case Event.HANG_LIMITS:
                self.hang_limits = record
            case Event.JOB_ENDED:
                self.end = record

    def _assign_ranks(self, plan: Record) -> None:
        """Assign the ranks of a plan to the workers, and add its nodes.

        Workers that have ended and have no rank in it are removed.
        """
        ranks = {member["worker"]: member for member in plan["members"]}
        self.workers = {
            name: place for name, place in self.workers.items() if place.alive or name in ranks
        }
        for name, place in self.workers.items():
            place.rank = ranks[name]["rank"] if name in ranks else None
        self.nodes |= {member["node"] for member in plan["members"]}

    def _mark_ended(self, worker: str) -> None:
        """Mark a worker as ended, or remove it if it has no rank."""
        place = self.workers.get(worker)
        if place is not None:
            place.alive = False
            if place.rank is None:
                del self.workers[worker]

    def _note_copy(self, tier: str, step: int, t_ns: int) -> None:
        """Note a complete copy of the state, if it is the newest of its tier."""
        newest = self.stored.get(tier)
        if step >= 0 and (newest is None or step >= newest.step):
            self.stored[tier] = NewestCopy(step, t_ns)


def newest_run(directory: Path | None) -> Path:
    """Return ``directory``, or the newest run below ``chaoskit-runs`` of the current directory.

    Raises:
        BadInput: if ``directory`` has no journals, or there is no run.
    """
    if directory is not None:
        if not (directory / "journal").is_dir():
            raise BadInput(
                "run_dir", str(directory), "name the directory of a run, with the folder journal"
            )
        return directory
    runs = [path.parent for path in Path("chaoskit-runs").glob("**/journal") if path.is_dir()]
    if not runs:
        raise BadInput(
            "run_dir", None, "name the directory of a run: there is none below ./chaoskit-runs"
        )
    return max(runs, key=lambda path: (path / "journal").stat().st_mtime)
