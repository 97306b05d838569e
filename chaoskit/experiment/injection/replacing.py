"""Lost nodes that are replaced while their run goes on."""

from __future__ import annotations

import asyncio
from typing import Any

from chaoskit.errors import ChaoskitError
from chaoskit.journal import Journal
from chaoskit.plaintext import same_but_ports
from chaoskit.substrate.core.base import Cluster
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Heartbeat, NodeLost

#: After the first attempt that failed; doubled each time. What a lost node leaves behind may just be ending.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 15.0


class NodeReplacer:
    """Starts another node under the name of each one that is lost, and tries again until that is heard.

    Args:
        most: so many nodes are replaced in the run. join_s: one that was started is heard within this time.
    """

    def __init__(self, cluster: Cluster, most: int, journal: Journal, join_s: float) -> None:
        self._cluster, self._left, self._journal, self._join_s = cluster, most, journal, join_s
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by node, until it is heard
        self._started: set[str] = set()  # of these: another one was started

    def hear(self, message: Any) -> None:
        """Take in a message of the coordinator. They come in its order: a node that is heard again is there again."""
        match message:
            case NodeLost(node) if self._left and node not in self._tasks:
                self._left -= 1
                self._tasks[node] = asyncio.get_running_loop().create_task(
                    self._replace(node), name=f"replace {node}"
                )
            case Heartbeat(node) if (task := self._tasks.pop(node, None)) is not None:
                if task.done():
                    task.result()
                task.cancel()
                if node not in self._started:  # it came back by itself
                    self._left += 1
                self._started.discard(node)

    async def _replace(self, node: str) -> None:
        pause_s, told = FIRST_PAUSE_S, ""
        while True:
            try:
                await self._cluster.replace(node)
            except ChaoskitError as error:
                if not same_but_ports(reason := str(error), told):
                    self._journal.write(Event.REPLACEMENT_FAILED, node=node, reason=reason)
                    told = reason
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._started.add(node)
                self._journal.write(Event.NODE_REPLACED, node=node)
                await asyncio.sleep(self._join_s)  # else it was lost before it came

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks.values():
            task.cancel()
        ended = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure
