"""A thread that stands in for the controllers of JobSets and TrainJobs in the tests' namespace.

-> ``jobset.py`` and ``trainjob.py``: its decisions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from support.jobs import cluster, jobset, trainjob
from support.nodes import pods

#: Seconds between two looks if no event arrives.
_LOOK_S = 1.0
_WATCH_S = 5
_WATCHED = ("JobSet", "TrainJob", "Job")
#: HTTP statuses after which the next look may succeed: the object has changed, the server is busy
#: or still reads a new CRD, or no answer has come (0).
_RETRIED = (cluster.NOT_FOUND, cluster.CONFLICT, 429, 500, 503, 504, 0)


class StandInController:
    """The controllers of JobSets and TrainJobs, from ``start`` to ``close``.

    Attributes:
        errors: errors of requests that fail again when they are repeated.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._change, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread, and those that wait for events."""
        self._thread.start()
        for kind in _WATCHED:
            threading.Thread(target=self._watch, args=(kind,), daemon=True).start()

    def close(self) -> None:
        """End the thread. Those that wait for events end with the next one, or after 5 s."""
        self._over.set()
        self._change.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._over.is_set():
            self._change.wait(_LOOK_S)
            self._change.clear()
            try:
                jobsets = cluster.all_of("JobSet")
                for entry in cluster.all_of("TrainJob"):
                    trainjob.reconcile(_with_kind(entry, "TrainJob"), jobsets)
                jobs = cluster.all_of("Job")
                for entry in jobsets:
                    jobset.reconcile(_with_kind(entry, "JobSet"), _with_labels(jobs))
            except OSError as error:
                if cluster.status_of(error) not in _RETRIED:
                    self.errors.append(str(error))
            except Exception as error:  # noqa: BLE001 - a test must see it
                self.errors.append(repr(error))

    def _watch(self, kind: str) -> None:
        """Note each event about objects of a kind. This runs in a thread."""
        path = f"{cluster.path(kind)}?watch=true&timeoutSeconds={_WATCH_S}"
        while not self._over.is_set():
            with contextlib.suppress(OSError):  # the next look comes without an event, too
                for _ in pods.stream(path):
                    self._change.set()


def _with_kind(entry: Any, kind: str) -> Any:
    """Return an object of a list with its kind, which entries of lists lack."""
    groups = {
        "JobSet": "jobset.x-k8s.io/v1alpha2",
        "TrainJob": "trainer.kubeflow.org/v1alpha1",
    }
    return {"apiVersion": groups[kind], "kind": kind, **entry}


def _with_labels(jobs: list[Any]) -> list[Any]:
    """Return the Jobs that have labels, as all Jobs of JobSets do."""
    return [job for job in jobs if job["metadata"].get("labels")]


@contextlib.contextmanager
def controllers() -> Iterator[StandInController]:
    """Run the controllers until the context ends. Their CRDs are installed first.

    Raises:
        AssertionError: at the end, if a request failed.
    """
    pods.namespace()
    cluster.install_crds("jobset", "trainjob", "trainingruntime", "clustertrainingruntime")
    controller = StandInController()
    controller.start()
    try:
        yield controller
    finally:
        controller.close()
    assert not controller.errors, controller.errors
