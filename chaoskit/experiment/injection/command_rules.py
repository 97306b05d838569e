"""Log rules on the logs of a command's nodes. They are told of, and nothing is done: its launcher is under test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chaoskit.journal import Journal
from chaoskit.logrule import LogRule
from chaoskit.rules import Fired, RuleVerdict, Watch
from chaoskit.rules.budget import Budget
from chaoskit.rules.follow import Splitter
from chaoskit.vocabulary import Event

_SHOWN_CHARS = 200


class NodeLogs:
    """Watches one log a node, in which all its ranks write.

    Args:
        now_s: on the monotonic clock: the nodes start.
    """

    def __init__(
        self, rules: Sequence[LogRule], nodes: Iterable[str], journal: Journal, now_s: float
    ) -> None:
        self._journal, self._budget = journal, Budget()
        self._watches = (
            {node: [Watch(rule, now_s, self._budget) for rule in rules] for node in nodes}
            if rules
            else {}
        )
        self._splitters = {node: Splitter() for node in self._watches}

    def feed(self, node: str, data: bytes, now_s: float, step: int | None) -> None:
        """What ``node`` has written. ``step``: that any log has shown."""
        if not self._watches:
            return
        with self._budget:
            for line in self._splitters[node].feed(data):
                for watch in self._watches[node]:
                    self._tell(node, watch.feed(now_s, line), step, line)

    @property
    def are_set(self) -> bool:
        """Return whether there are rules, which tell of silence, too."""
        return bool(self._watches)

    def tick(self, running: Iterable[str], now_s: float, step: int | None) -> None:
        """These nodes still run, and all that they wrote was fed."""
        for node in running if self._watches else ():
            for watch in self._watches[node]:
                self._tell(node, watch.tick(now_s), step)

    def _tell(self, node: str, found: list[Fired], step: int | None, line: str = "") -> None:
        for fired in found:
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
