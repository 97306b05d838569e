"""Log rules on the logs of a command's nodes.

They report and never act, because the command's launcher is under test.

-> rules/engine.py: when a rule fires. runlog/checks.py (rules_fired): the outcome shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chaoskit.journal import Journal
from chaoskit.logrule import LogRule
from chaoskit.rules import Fired, RuleVerdict, RuleWatch
from chaoskit.rules.budget import Budget
from chaoskit.rules.log_file import LineSplitter
from chaoskit.vocabulary import Event

_SHOWN_CHARS = 200


class CommandLogs:
    """The logs of a command, one for each node, and the rules that watch them.

    A log holds the output of all ranks of its node.

    Args:
        rules: the log rules.
        nodes: the names of the nodes.
        journal: receives a record of each rule that fires.
        now_s: monotonic time at which the nodes start.
    """

    def __init__(
        self, rules: Sequence[LogRule], nodes: Iterable[str], journal: Journal, now_s: float
    ) -> None:
        self._journal, self._budget = journal, Budget()
        self._watches = (
            {node: [RuleWatch(rule, now_s, self._budget) for rule in rules] for node in nodes}
            if rules
            else {}
        )
        self._splitters = {node: LineSplitter() for node in self._watches}

    def feed(self, node: str, data: bytes, now_s: float, step: int | None) -> None:
        """Apply the rules to output of ``node`` and record each rule that fires.

        Args:
            node: the node that wrote the output.
            data: the output, which may end within a line.
            now_s: the monotonic time.
            step: the newest step in any log, for the records; None before the first.
        """
        if not self._watches:
            return
        with self._budget:
            for line in self._splitters[node].feed(data):
                for watch in self._watches[node]:
                    self._record(node, watch.feed(now_s, line), step, line)

    @property
    def are_set(self) -> bool:
        """True if there are rules.

        They can fire on silence, too, so the caller must call :meth:`tick`.
        """
        return bool(self._watches)

    def tick(self, running: Iterable[str], now_s: float, step: int | None) -> None:
        """Apply the rules on silence to nodes that still run, and record each rule that fires.

        Call it after all output of these nodes was fed.
        """
        for node in running if self._watches else ():
            for watch in self._watches[node]:
                self._record(node, watch.tick(now_s), step)

    def _record(self, node: str, firings: list[Fired], step: int | None, line: str = "") -> None:
        """Write a journal record for each rule that fired, with its action: alert or none.

        A rule that its stopPattern has ended has none.
        """
        for fired in firings:
            fields: dict[str, Any] = {
                "rule": fired.rule,
                "verdict": fired.verdict,
                "reason": fired.reason,
            }
            fields |= {"value": fired.value, "limit": fired.limit, "line": line[:_SHOWN_CHARS]}
            action = "none" if fired.verdict == RuleVerdict.STOPPED else "alert"
            self._journal.write(
                Event.RULE_FIRED, worker=node, rank=None, step=step, action=action, **fields
            )
