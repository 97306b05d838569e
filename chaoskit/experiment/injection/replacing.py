"""Replacement of lost nodes while their run goes on, if the plan allows it.

-> coordinator/handlers/on_node.py: the decision that a node is lost. config.py
(node_replacements): how many may be replaced. launcher/outage.py: a launch that lost all nodes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from chaoskit.errors import ChaoskitError
from chaoskit.journal import Journal
from chaoskit.plaintext import same_but_ports
from chaoskit.substrate.core.base import Cluster
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Heartbeat, NodeLost

#: Pause after the first failed attempt; doubled each time. A lost node may leave processes that are
#: just ending.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 15.0


class NodeReplacer:
    """Start a new node under the name of each lost one, until it sends a heartbeat.

    Args:
        cluster: starts the nodes.
        replacements_max: the number of nodes that may be replaced in the run.
        journal: receives a record of each replacement.
        join_s: time in seconds after which a new node that was not heard from is replaced again.
    """

    def __init__(
        self, cluster: Cluster, replacements_max: int, journal: Journal, join_s: float
    ) -> None:
        self._cluster, self._journal, self._join_s = cluster, journal, join_s
        self._replacements_left = replacements_max
        # node -> task that replaces it, until its first heartbeat
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._restarted_nodes: set[str] = set()  # nodes among these that were started again

    def hear(self, message: Any) -> None:
        """Begin to replace a node that is lost, and end its replacement with its next heartbeat.

        Messages come in the coordinator's order, so a heartbeat after a loss means that the node is
        back. A node that comes back by itself does not count against the limit. Other messages are
        ignored, and so are losses beyond the limit. An error of the replacement is raised.
        """
        match message:
            case NodeLost(node) if self._replacements_left and node not in self._tasks:
                self._replacements_left -= 1
                self._tasks[node] = asyncio.get_running_loop().create_task(
                    self._replace(node), name=f"replace {node}"
                )
            case Heartbeat(node) if (task := self._tasks.pop(node, None)) is not None:
                if task.done():
                    task.result()
                task.cancel()
                if node not in self._restarted_nodes:  # the node came back without a replacement
                    self._replacements_left += 1
                self._restarted_nodes.discard(node)

    async def _replace(self, node: str) -> None:
        """Start the node again and again until a heartbeat of it cancels this task.

        A node that sends none within ``join_s`` is started again. Each start, and each new reason
        of a failure, is recorded in the journal.
        """
        pause_s, last_reason = FIRST_PAUSE_S, ""
        while True:
            try:
                await self._cluster.replace(node)
            except ChaoskitError as error:
                if not same_but_ports(reason := str(error), last_reason):
                    self._journal.write(Event.REPLACEMENT_FAILED, node=node, reason=reason)
                    last_reason = reason
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._restarted_nodes.add(node)
                self._journal.write(Event.NODE_REPLACED, node=node)
                # no heartbeat by then: the new node was lost, too
                await asyncio.sleep(self._join_s)

    async def close(self) -> None:
        """Cancel all replacements; raise the first error of one."""
        for task in self._tasks.values():
            task.cancel()
        results = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
