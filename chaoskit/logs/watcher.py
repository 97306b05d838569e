"""Log rules on the logs of a node's ranks, while they grow.

The clock of a rule can stand still. It runs while the rank can be expected to print: it trains in
the current generation and does not wait. It stands while the rank waits for others, regroups,
receives state or is in a declared long phase. It also stands while more has been written than could
be read. Time in which no look happened is left out, for instance when the whole node was frozen. A
rank that another one delays is therefore not reported as hanging. A line counts as printed at the
look before it was read, so a limit may be met early by the time between two looks.

A worker without a rank is not watched. A watch begins with its first rank, and again with every new
generation. :mod:`chaoskit.logs.process` decides when to look.

-> ``rules/engine.py``: when a rule fires. ``logrule.py``: the settings of a rule.
-> ``coordinator/detectors/rulings.py`` and ``coordinator/handlers/on_rule_fired.py``: what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chaoskit.logrule import LogRule
from chaoskit.process.progress_board import Board
from chaoskit.rules import Fired, RuleVerdict, RuleWatch
from chaoskit.rules.budget import UNLIMITED, Budget
from chaoskit.rules.log_file import LineSplitter, LogFile
from chaoskit.vocabulary import WAITING_PHASES
from chaoskit.wire.messages import LinesMatched, RuleFired

LOOK_S = 0.05
#: A metric that stays bad is reported again after this time of the rule's clock: the reaction did
#: not help.
REMIND_S = 5.0
#: Most bytes that a look reads of a log (1.3 MB/s). A log that grows faster is read late.
LOOK_BYTES = 1 << 16
#: Longest time between two looks that counts; the rest is left out.
_GAP_S = 0.5
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class RankStanding:
    """State of a worker according to its board.

    Attributes:
        generation: generation that the worker trains in; 0 before its first.
        rank: -1 for none.
        step: number of committed steps.
        waits: True if the rank is in a phase in which it cannot be expected to print.
    """

    generation: int
    rank: int
    step: int
    waits: bool

    @classmethod
    def of(cls, board: Board) -> RankStanding:
        """Return the state of a live worker."""
        return cls(board.generation, board.rank, board.step, board.phase in WAITING_PHASES)


class WatchedLog:
    """The rules on the log of one worker.

    It is driven by looks at file and board, and has no clock of its own.

    Args:
        worker: name of the worker.
        node: node of the worker.
        rules: the rules on this log.
        path: path of the log, which may not exist yet.
        now_s: current time in seconds, on the clock of :meth:`look`.
        budget: CPU time that a pattern may take for a line.
        switched_off: names of rules that exceeded it on any log of the node; extended here. None
            for a set of its own.
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
        switched_off: set[str] | None = None,
    ) -> None:
        self._worker, self._node, self._rules = worker, node, rules
        self._budget = budget
        self._switched_off = set[str]() if switched_off is None else switched_off
        self._file, self._splitter = LogFile(path), LineSplitter()
        self._watches: list[RuleWatch] = []
        self._generation = self._step = 0
        self._looked_s, self._clock_s = now_s, 0.0
        self._matched_rules: tuple[str, ...] = ()
        self._reported: dict[str, tuple[Fired, float]] = {}  # rule -> last report, and its time
        self._last_line = ""

    def look(self, now_s: float, standing: RankStanding) -> list[RuleFired | LinesMatched]:
        """Read the new part of the log, up to :data:`LOOK_BYTES`.

        Return a report of each rule that fired. One that still holds, with another action than
        ``alert``, is reported again after :data:`REMIND_S`. When a rule matches its first line, a
        further report names all rules that have matched one. A worker without a rank has no
        reports; its lines are read and dropped.

        Args:
            now_s: present time in seconds, on the clock of the constructor.
            standing: state of the worker at this time.
        """
        elapsed_s, self._looked_s = min(now_s - self._looked_s, _GAP_S), now_s
        data = self._file.read(LOOK_BYTES)
        lines = self._splitter.feed(data) if data else []
        if standing.rank < 0:
            return []
        self._start_watches(standing.generation)
        fired_rules = [fired_rule for line in lines for fired_rule in self._read(line)]
        if len(data) < LOOK_BYTES and not standing.waits:
            self._clock_s += elapsed_s
            due = [watch for watch in self._watches if self._clock_s > watch.deadline_s]
            fired_rules += [(watch, fired) for watch in due for fired in watch.tick(self._clock_s)]
        for watch, fired in fired_rules:
            self._reported[watch.rule.name] = (fired, self._clock_s)
            self._switched_off.update(
                [fired.rule] if fired.verdict == RuleVerdict.SWITCHED_OFF else []
            )
        reports: list[RuleFired | LinesMatched] = [
            self._report(watch, fired, standing)
            for watch, fired in [*fired_rules, *self._due_reminders()]
        ]
        self._step = standing.step
        return [*self._report_matched(), *reports]

    def _due_reminders(self) -> list[tuple[RuleWatch, Fired]]:
        """Return the rules to be reported again, each with its last report.

        They still hold, ask for more than an alert, and were reported long enough ago.
        """
        reminders = []
        for watch in self._watches:
            fired, reported_s = self._reported.get(watch.rule.name, (None, 0.0))
            due = self._clock_s - reported_s >= REMIND_S and watch.rule.action != "alert"
            if fired is not None and watch.ongoing and due:
                self._reported[watch.rule.name] = (fired, self._clock_s)
                reminders.append((watch, fired))
        return reminders

    def _start_watches(self, generation: int) -> None:
        """Start a watch for each rule with the first rank.

        Restart it with each generation, which repeats a step. Switch off rules that were too slow.
        """
        if not self._watches:
            self._watches = [RuleWatch(rule, self._clock_s, self._budget) for rule in self._rules]
        elif generation != self._generation:
            for watch in self._watches:
                watch.restart(self._clock_s)
        self._generation = generation
        for watch in self._watches:
            if watch.rule.name in self._switched_off and not watch.stopped:
                watch.switch_off()

    def _read(self, line: str) -> list[tuple[RuleWatch, Fired]]:
        """Match a line against all rules, and return those that fired."""
        self._last_line = line
        return [
            (watch, fired) for watch in self._watches for fired in watch.feed(self._clock_s, line)
        ]

    def _report_matched(self) -> list[RuleFired | LinesMatched]:
        """Return a report of the rules that have matched a line, or [] if it would be the same."""
        matched = tuple(watch.rule.name for watch in self._watches if watch.matched)
        if matched == self._matched_rules:
            return []
        self._matched_rules = matched
        return [LinesMatched(self._worker, matched)]

    def _report(self, watch: RuleWatch, fired: Fired, standing: RankStanding) -> RuleFired:
        """Return the report of a rule that fired, with the state of the rank and the last line."""
        return RuleFired(
            worker=self._worker,
            node=self._node,
            rank=standing.rank,
            generation=standing.generation,
            since_step=min(self._step, standing.step),  # the line may date from the last look
            step=standing.step,
            rule=fired.rule,
            verdict=fired.verdict.value,
            action="none" if fired.verdict == RuleVerdict.STOPPED else fired.action,
            reason=fired.reason,
            value=fired.value,
            limit=fired.limit,
            matched=watch.matched,
            line=self._last_line[:_SHOWN_CHARS],
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
