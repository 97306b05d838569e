"""Which nodes may be given workers, by what they find on themselves: a pure state machine."""

from __future__ import annotations

from collections.abc import Collection

from chaoskit.control import events
from chaoskit.control.membership import Membership
from chaoskit.health.verdict import HealthVerdict, decide
from chaoskit.messages import HealthReport

_DETAIL_REASONS = 3


class Fitness:
    """The last report of each node, and what is to be done about it.

    A node that is out stays out, also when it finds nothing any more: what comes and goes would take its ranks along
    each time.

    Args:
        enforce: else nothing is ever done.
    """

    def __init__(self, *, enforce: bool) -> None:
        self._enforce = enforce
        self._reports: dict[str, HealthReport] = {}
        self._verdicts: dict[str, HealthVerdict] = {}

    def hear(self, report: HealthReport) -> HealthVerdict | None:
        """A node has looked at itself. None if it says again what is known."""
        known = self._reports.get(report.node)
        if known is not None and known.findings == report.findings:
            return None
        self._reports[report.node] = report
        self._verdicts[report.node] = decide(report.node, report.findings)
        return self._verdicts[report.node]

    def forget(self, node: str) -> None:
        """Another agent speaks for it from now on: it may be another machine, or mended."""
        self._reports.pop(node, None)
        self._verdicts.pop(node, None)

    def judge(self, membership: Membership) -> events.Unfit | events.Fit | None:
        """What the membership should be told next, as it does not know it.

        A node that alone has the state of the training is left in peace until another one has it, too.
        """
        for node, verdict in self._verdicts.items() if self._enforce else ():
            unjudged = node in membership.on_probation
            if node not in membership.nodes or (node in membership.unfit and not unjudged):
                continue
            if not verdict.refused and unjudged:
                return events.Fit(node)
            if verdict.refused and not _is_alone(node, membership.keepers):
                return events.Unfit(node, _in_short(verdict))
        return None


def _is_alone(node: str, keepers: Collection[str]) -> bool:
    return bool(keepers) and set(keepers) <= {node}


def _in_short(verdict: HealthVerdict) -> str:
    more = len(verdict.reasons) - _DETAIL_REASONS
    text = "; ".join(verdict.reasons[:_DETAIL_REASONS])
    return f"{text}; and {more} more" if more > 0 else text
