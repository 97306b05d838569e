"""Use and update of the quarantine list by a launch.

-> ``health/quarantine.py``: the list. ``coordinator/detectors/fitness.py``: which nodes get no
workers during a run. ``health/verdict.py``: when a node is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaoskit.health import Quarantine, decide
from chaoskit.health.quarantine import state_directory
from chaoskit.wire.messages import HealthReport


class QuarantinedNodes:
    """The quarantined nodes at the start of a launch, and the health reports that follow.

    Args:
        enforce: True if nodes that were released must prove themselves in this launch. False uses
            them without proof.

    Attributes:
        refused: nodes that found themselves unfit, each with its first reason.

    Raises:
        BadInput: if the list is damaged.
    """

    def __init__(self, *, enforce: bool) -> None:
        self._quarantine = Quarantine(state_directory())
        self._excluded = self._quarantine.kept_out()
        self._on_probation = self._quarantine.on_probation() if enforce else ()
        self._passed: set[str] = set()
        self.refused: dict[str, str] = {}

    def added_to(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return ``settings`` with the nodes of the list.

        Quarantined nodes are excluded, and released ones are put on probation.
        """
        added = dict(settings)
        for name, nodes in (("quarantined", self._excluded), ("on_probation", self._on_probation)):
            own_nodes = settings.get(name, ())
            if isinstance(
                own_nodes, list | tuple
            ):  # invalid settings are refused later, with all others
                added[name] = (*own_nodes, *nodes)
        return added

    def watching(self, watch: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a callback that notes health reports, and then calls ``watch``."""

        def note_and_watch(message: Any) -> None:
            if isinstance(message, HealthReport):
                self._note(message)
            watch(message)

        return note_and_watch

    def _note(self, report: HealthReport) -> None:
        """Note that a node is fit, or add it to ``refused`` with its first reason."""
        verdict = decide(report.node, report.findings)
        if verdict.refused:
            self.refused.setdefault(report.node, verdict.reasons[0])
        else:
            self._passed.add(report.node)

    def conclude(self) -> None:
        """Remove nodes on probation from the list if they were found fit, and never unfit."""
        for node in self._passed.intersection(self._on_probation).difference(self.refused):
            self._quarantine.prove(node)
