"""The fitness of nodes for workers, judged by health reports on the nodes and their links.

A pure state machine.

-> health/verdict.py: which findings make a node unfit; daemon/node_check.py makes the reports.
coordinator/handlers/on_measurement.py acts on the verdicts. Nodes that are kept out before a run:
health/quarantine.py.
"""

from __future__ import annotations

from collections.abc import Collection

from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.health.verdict import HealthVerdict, decide
from chaoskit.wire.messages import Finding, HealthReport

_DETAIL_REASONS = 3
#: Name of the reports that a node makes on itself. Each other kind of report has a name of its own.
ITSELF = "itself"


class Fitness:
    """Health reports on each node, and the decision which nodes are unfit.

    An unfit node stays unfit, even when later reports find nothing: an intermittent fault would
    cost its ranks each time.

    Args:
        enforce: act on the verdicts; if False, they are only recorded.
    """

    def __init__(self, *, enforce: bool) -> None:
        self._enforce = enforce
        # node -> kind of report -> the last report
        self._reports: dict[str, dict[str, HealthReport]] = {}
        self._verdicts: dict[str, HealthVerdict] = {}

    def hear(self, report: HealthReport, kind: str = ITSELF) -> HealthVerdict | None:
        """Take in a report; ``kind`` names its source, such as the links or the node itself.

        Return the verdict on the node, from its reports of all kinds, or None if the findings of
        this kind have not changed.
        """
        reports = self._reports.setdefault(report.node, {})
        if kind in reports and reports[kind].findings == report.findings:
            return None
        reports[kind] = report
        self._verdicts[report.node] = decide(report.node, self.report(report.node).findings)
        return self._verdicts[report.node]

    def knows(self, node: str, kind: str) -> bool:
        """Return whether there is a report of this kind on a node."""
        return kind in self._reports.get(node, ())

    def report(self, node: str) -> HealthReport:
        """Return the last reports of all kinds on a node, merged into one; empty without any."""
        reports = self._reports.get(node, {})
        findings: list[Finding] = [
            finding for name in sorted(reports) for finding in reports[name].findings
        ]
        return HealthReport(
            node, tuple(findings), sum(report.took_ms for report in reports.values())
        )

    def forget(self, node: str) -> None:
        """Forget the reports on a node with a new agent: it may be another machine, or repaired."""
        self._reports.pop(node, None)
        self._verdicts.pop(node, None)

    def judge(
        self, membership: Membership, untested: Collection[str] = (), needed: Collection[str] = ()
    ) -> events.Unfit | events.Fit | None:
        """Return the next verdict that the membership has not taken in, or None if there is none.

        The verdict on a node that alone has the state of the training waits until another node has
        the state.

        Args:
            untested: nodes with links that are not tested yet. Those on probation must wait.
            needed: nodes on probation that are needed at once, and so are fit unless a report
                refuses them.
        """
        for node in sorted(membership.on_probation.intersection(needed)):
            if node in membership.nodes and not (
                node in self._verdicts and self._verdicts[node].refused
            ):
                return events.Fit(node)
        for node, verdict in self._verdicts.items() if self._enforce else ():
            is_on_probation = node in membership.on_probation
            if node not in membership.nodes or (node in membership.unfit and not is_on_probation):
                continue
            if (
                not verdict.refused
                and is_on_probation
                and ITSELF in self._reports[node]
                and node not in untested
            ):
                return events.Fit(node)
            if verdict.refused and not _is_alone(node, membership.keepers):
                return events.Unfit(node, _in_short(verdict))
        return None


def _is_alone(node: str, keepers: Collection[str]) -> bool:
    return bool(keepers) and set(keepers) <= {node}


def _in_short(verdict: HealthVerdict) -> str:
    """Return the first reasons of a verdict, and the number of the others, in words."""
    other_count = len(verdict.reasons) - _DETAIL_REASONS
    text = "; ".join(verdict.reasons[:_DETAIL_REASONS])
    return f"{text}; and {other_count} more" if other_count > 0 else text
