"""Log rules on the logs of a node's ranks, while they grow.

The clock of a rule is one that can stand still. It runs while the rank can be expected to print: it trains in the
generation of the moment and waits for nobody. It stands while the rank waits for others, regroups, takes state over or
is in a declared long phase; while more was written than could be read yet; and it leaves out what nobody looked at, as
when the whole node was frozen. So a rank that is held up by another one is not called hanging for it. A line counts as
printed at the last look before it was read: a limit may be met early by as much as lies between two looks.

A worker without a rank is not watched. With its first rank a watch begins, with every new generation it begins anew.
Who looks, and how often, is a matter of :mod:`chaoskit.logs.process`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chaoskit.logrule import LogRule
from chaoskit.process.heartbeat_page import Board
from chaoskit.rules import Fired, RuleVerdict, Watch
from chaoskit.rules.budget import UNLIMITED, Budget
from chaoskit.rules.follow import LogFile, Splitter
from chaoskit.vocabulary import WAITING_PHASES
from chaoskit.wire.messages import LinesMatched, RuleFired

LOOK_S = 0.05
#: A metric that stays bad is told of again after so long, of the rule's clock: what was done did not help.
REMIND_S = 5.0
#: Of one log, at one look: 1.3 MB/s. What is written faster is read behind its time.
LOOK_BYTES = 1 << 16
#: If nobody looked for longer, the rest of that time does not count.
_GAP_S = 0.5
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Standing:
    """What a worker's board shows. ``rank``: -1 for none; ``waits``: nothing can be expected of it."""

    generation: int
    rank: int
    step: int
    waits: bool

    @classmethod
    def of(cls, board: Board) -> Standing:
        """Of a live worker."""
        return cls(board.generation, board.rank, board.step, board.phase in WAITING_PHASES)


class WorkerLog:
    """The rules on the log of one worker. Fed with looks at file and board; it has no clock of its own.

    Args:
        worker, node: whose log it is.
        path: of the log; it may not be there yet.
        now_s: on any clock.
        budget: what a pattern may take for a line.
        off: names of rules that used it up, on any log of the node; added to.
    """

    def __init__(
        self,
        worker: str,
        node: str,
        rules: Sequence[LogRule],
        path: Path,
        now_s: float,
        *,
        budget: Budget = UNLIMITED,
        off: set[str] | None = None,
    ) -> None:
        self._worker, self._node, self._rules = worker, node, rules
        self._budget, self._off = budget, set[str]() if off is None else off
        self._file, self._splitter = LogFile(path), Splitter()
        self._watches: list[Watch] = []
        self._generation = self._step = 0
        self._looked_s, self._clock_s = now_s, 0.0
        self._matched: tuple[str, ...] = ()
        self._told: dict[str, tuple[Fired, float]] = {}  # by rule: what was told last, and when
        self._line = ""

    def look(self, now_s: float, standing: Standing) -> list[RuleFired | LinesMatched]:
        """Read on. Returns what is to be told: rules that fired, and rules whose first line has come."""
        passed_s, self._looked_s = min(now_s - self._looked_s, _GAP_S), now_s
        data = self._file.read(LOOK_BYTES)
        lines = self._splitter.feed(data) if data else []
        if standing.rank < 0:
            return []
        self._begin(standing.generation)
        found = [one for line in lines for one in self._read(line)]
        if len(data) < LOOK_BYTES and not standing.waits:
            self._clock_s += passed_s
            due = [watch for watch in self._watches if self._clock_s > watch.deadline_s]
            found += [(watch, fired) for watch in due for fired in watch.tick(self._clock_s)]
        for watch, fired in found:
            self._told[watch.rule.name] = (fired, self._clock_s)
            self._off.update([fired.rule] if fired.verdict == RuleVerdict.SWITCHED_OFF else [])
        told: list[RuleFired | LinesMatched] = [
            self._say(watch, fired, standing) for watch, fired in [*found, *self._remind()]
        ]
        self._step = standing.step
        return [*self._say_matched(), *told]

    def _remind(self) -> list[tuple[Watch, Fired]]:
        """What still holds, and asks for more than to be told of."""
        reminders = []
        for watch in self._watches:
            fired, said_s = self._told.get(watch.rule.name, (None, 0.0))
            due = self._clock_s - said_s >= REMIND_S and watch.rule.action != "alert"
            if fired is not None and watch.ongoing and due:
                self._told[watch.rule.name] = (fired, self._clock_s)
                reminders.append((watch, fired))
        return reminders

    def _begin(self, generation: int) -> None:
        """A watch for each rule with the first rank; anew with each generation, which repeats a step."""
        if not self._watches:
            self._watches = [Watch(rule, self._clock_s, self._budget) for rule in self._rules]
        elif generation != self._generation:
            for watch in self._watches:
                watch.restart(self._clock_s)
        self._generation = generation
        for watch in self._watches:
            if watch.rule.name in self._off and not watch.stopped:
                watch.switch_off()

    def _read(self, line: str) -> list[tuple[Watch, Fired]]:
        self._line = line
        return [
            (watch, fired) for watch in self._watches for fired in watch.feed(self._clock_s, line)
        ]

    def _say_matched(self) -> list[RuleFired | LinesMatched]:
        matched = tuple(watch.rule.name for watch in self._watches if watch.matched)
        if matched == self._matched:
            return []
        self._matched = matched
        return [LinesMatched(self._worker, matched)]

    def _say(self, watch: Watch, fired: Fired, standing: Standing) -> RuleFired:
        return RuleFired(
            worker=self._worker,
            node=self._node,
            rank=standing.rank,
            generation=standing.generation,
            since_step=min(
                self._step, standing.step
            ),  # it may have been printed right after the last look
            step=standing.step,
            rule=fired.rule,
            verdict=fired.verdict.value,
            action="none" if fired.verdict == RuleVerdict.STOPPED else fired.action,
            reason=fired.reason,
            value=fired.value,
            limit=fired.limit,
            matched=watch.matched,
            line=self._line[:_SHOWN_CHARS],
        )

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
