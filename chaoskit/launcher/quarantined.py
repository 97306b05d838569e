"""The list of quarantined nodes, as a launch uses and updates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaoskit.health import Quarantine, decide
from chaoskit.health.quarantine import state_directory
from chaoskit.wire.messages import HealthReport


class QuarantinedNodes:
    """The quarantined nodes at the start of a launch, and what the launch finds out about them.

    Args:
        enforce: nodes that were released prove themselves in this launch; else they are used without that.

    Attributes:
        refused: nodes that found that they are not fit, and the first reason.

    Raises:
        BadInput: if the list is damaged.
    """

    def __init__(self, *, enforce: bool) -> None:
        self._quarantine = Quarantine(state_directory())
        self._out = self._quarantine.kept_out()
        self._on_probation = self._quarantine.on_probation() if enforce else ()
        self._passed: set[str] = set()
        self.refused: dict[str, str] = {}

    def added_to(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return ``settings`` of a run in which the nodes of the list are treated as the list says."""
        added = dict(settings)
        for name, nodes in (("quarantined", self._out), ("on_probation", self._on_probation)):
            given = settings.get(name, ())
            if isinstance(given, list | tuple):  # else it is refused with all other settings
                added[name] = (*given, *nodes)
        return added

    def watching(self, watch: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return ``watch`` with a look at the health reports of nodes before it."""

        def both(message: Any) -> None:
            if isinstance(message, HealthReport):
                self._note(message)
            watch(message)

        return both

    def _note(self, report: HealthReport) -> None:
        verdict = decide(report.node, report.findings)
        if verdict.refused:
            self.refused.setdefault(report.node, verdict.reasons[0])
        else:
            self._passed.add(report.node)

    def conclude(self) -> None:
        """Nodes on probation that were found fit, and never unfit, have proved themselves."""
        for node in self._passed.intersection(self._on_probation).difference(self.refused):
            self._quarantine.prove(node)
