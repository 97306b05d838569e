"""The pods of a job that already runs, as actions on them need to know them.

-> ``pod_backend.py`` and ``machine_pods.py`` carry out the actions.
"""

from __future__ import annotations

from typing import Protocol

from chaoskit.attach.jobs.pod_state import PodState


class AttachedPods(Protocol):
    """The pods of an attached job, by node. A node is a place of the job.

    Its pod may be replaced by another one, which has another UID.
    """

    def pod(self, node: str) -> PodState:
        """Return the pod of a node.

        Raises:
            ProcessLookupError: if no pod holds the place.
        """

    def is_pod_over(self, uid: str) -> bool:
        """Return whether the API server proves that no process of a pod runs.

        It has no such pod any more, or says that the pod has ended.
        """

    def is_life_over(self, uid: str, container_id: str) -> bool:
        """Return whether the API server proves that a life of a container is over.

        The container of this ID has ended, or its pod is over.
        """

    def crash(self, node: str) -> None:
        """Kill the first process of the container that trains, in the pod of a node.

        Raises:
            ProcessLookupError: if the container does not run any more.
            HarnessError: if that fails.
        """

    def nodes_on(self, machine: str) -> tuple[str, ...]:
        """Return the nodes whose pods are on a machine."""
