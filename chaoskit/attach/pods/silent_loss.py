"""The loss of pods in silence, as if they had lost their power.

A hand drops all packets of a pod. Its processes are killed then, and the pod is deleted. The rules
outlive the hand, and end with the network of the pod.

-> ``faults/nodes/losing.py`` has the fault. ``docs/architecture/hand.md``: the operation ``silence``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from chaoskit.attach.hands.hand import ACT_S, Hand
from chaoskit.attach.hands.pod_rules import count_of
from chaoskit.attach.pods.attached_pods import AttachedPods
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.errors import HarnessError, NodeUnreachable

#: Seconds after which the kernel lets packets pass again, if the pod exists still.
SILENT_S = 10.0
_COUNT_S = 0.5  # killed processes have ended their connections by then
_LOOK_S = 0.02


class SilentLosses:
    """Losses of pods, and the packets that were dropped in each.

    Args:
        pods: the pods of the job.
        requests: the requests to the API server.
        hand: returns the standing network hand in the pod of a node, or raises HarnessError.
    """

    def __init__(
        self, pods: AttachedPods, requests: PodRequests, hand: Callable[[str], Hand]
    ) -> None:
        self._pods, self._requests, self._hand = pods, requests, hand
        self._dropped: dict[str, int] = {}

    def dropped(self, node: str) -> int:
        """Return the packets that were dropped at the newest loss of a node, as last counted."""
        return self._dropped.get(node, 0)

    def lose(self, node: str) -> None:
        """End the pod of a node, so that none of its packets tells of it, and wait until it is over.

        Raises:
            ProcessLookupError: if the pod is gone or going, or its container does not run.
            HarnessError: if a hand or the API server refuses, or the pod is not over in time. If
                the pod was not deleted, its packets pass again.
        """
        pod, hand = self._requests.running(node), self._hand(node)
        self._dropped[node] = 0
        silence = hand.ask("silence", lasts_s=SILENT_S, limit_s=ACT_S)["number"]
        try:
            # a deletion alone leaves its processes two seconds to end in order
            self._pods.crash(node)
            with contextlib.suppress(NodeUnreachable):  # the crash is over: the pod must go
                self._count(node, hand, silence)
            self._requests.delete(pod, 0)
        except (HarnessError, ProcessLookupError):
            with contextlib.suppress(HarnessError):
                hand.ask("lift", effect=silence, limit_s=ACT_S)
            raise
        self._requests.await_over(pod)

    def _count(self, node: str, hand: Hand, silence: int) -> None:
        """Count the packets that tell of the end of the processes, until there are some.

        Raises NodeUnreachable if the hand does not answer any more. The count stays as it was.
        """
        until_s = time.monotonic() + _COUNT_S
        while not self._dropped[node] and time.monotonic() < until_s:
            self._dropped[node] = count_of(hand.ask("counters", effect=silence, limit_s=ACT_S))
            time.sleep(_LOOK_S)
