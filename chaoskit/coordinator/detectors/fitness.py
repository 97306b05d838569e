"""Which nodes may be given workers, by what they find on themselves and on their links: a pure state machine."""

from __future__ import annotations

from collections.abc import Collection

from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.health.verdict import HealthVerdict, decide
from chaoskit.wire.messages import Finding, HealthReport

_DETAIL_REASONS = 3
#: What a node itself reports. Other looks have other names.
ITSELF = "itself"


class Fitness:
    """What is known of each node, and what is to be done about it.

    A node that is out stays out, also when it finds nothing any more: what comes and goes would take its ranks along
    each time.

    Args:
        enforce: else nothing is ever done.
    """

    def __init__(self, *, enforce: bool) -> None:
        self._enforce = enforce
        self._looks: dict[str, dict[str, HealthReport]] = {}  # by node and look: the last report
        self._verdicts: dict[str, HealthVerdict] = {}

    def hear(self, report: HealthReport, look: str = ITSELF) -> HealthVerdict | None:
        """Somebody has looked at a node: what follows from that and all other looks. None if that is known."""
        looks = self._looks.setdefault(report.node, {})
        if look in looks and looks[look].findings == report.findings:
            return None
        looks[look] = report
        self._verdicts[report.node] = decide(report.node, self.report(report.node).findings)
        return self._verdicts[report.node]

    def knows(self, node: str, look: str) -> bool:
        """Whether somebody has looked in this way at a node."""
        return look in self._looks.get(node, ())

    def report(self, node: str) -> HealthReport:
        """The last reports of all looks at a node, in one."""
        looks = self._looks.get(node, {})
        found: list[Finding] = [one for name in sorted(looks) for one in looks[name].findings]
        return HealthReport(node, tuple(found), sum(report.took_ms for report in looks.values()))

    def forget(self, node: str) -> None:
        """Another agent speaks for it from now on: it may be another machine, or mended."""
        self._looks.pop(node, None)
        self._verdicts.pop(node, None)

    def judge(
        self, membership: Membership, untested: Collection[str] = (), needed: Collection[str] = ()
    ) -> events.Unfit | events.Fit | None:
        """What the membership should be told next, as it does not know it.

        A node that alone has the state of the training is left in peace until another one has it, too.

        Args:
            untested: nodes whose links are not known yet. That is no reason not to use one, unless it is on probation.
            needed: nodes on probation that cannot be waited for. One that is found unfit later is given up then.
        """
        for node in sorted(membership.on_probation.intersection(needed)):
            if node in membership.nodes and not (
                node in self._verdicts and self._verdicts[node].refused
            ):
                return events.Fit(node)
        for node, verdict in self._verdicts.items() if self._enforce else ():
            unjudged = node in membership.on_probation
            if node not in membership.nodes or (node in membership.unfit and not unjudged):
                continue
            if (
                not verdict.refused
                and unjudged
                and ITSELF in self._looks[node]
                and node not in untested
            ):
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
