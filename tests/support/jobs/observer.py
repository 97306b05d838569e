"""Observations of all objects of the tests' namespace, in the form of the recordings.

-> ``states.py`` compares them with recordings.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from support.jobs import cluster
from support.nodes import pods

_KINDS = ("JobSet", "Job", "Pod", "Service")
_WATCH_S = 30


@contextlib.contextmanager
def observed() -> Iterator[list[dict[str, Any]]]:
    """Yield a list to which each event about the objects is added until the context ends."""
    observations: list[dict[str, Any]] = []
    over = threading.Event()
    for kind in _KINDS:
        listing = pods.ask("GET", cluster.path(kind))
        assert not listing["items"], f"the namespace has objects of the kind {kind}"
        version = listing["metadata"]["resourceVersion"]
        arguments = (kind, version, observations, over)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()
    try:
        yield observations
    finally:
        over.set()


def _watch(
    kind: str, version: str, observations: list[dict[str, Any]], over: threading.Event
) -> None:
    """Add the events about objects of a kind. This runs in a thread."""
    began_s = time.monotonic()
    while not over.is_set():
        query = f"watch=true&timeoutSeconds={_WATCH_S}&resourceVersion={version}"
        rest = b""
        for piece in pods.stream(f"{cluster.path(kind)}?{query}"):
            *lines, rest = (rest + piece).split(b"\n")
            for event in map(json.loads, lines):
                version = event["object"]["metadata"]["resourceVersion"]
                observation = {"t": time.monotonic() - began_s, "what": "watch", "kind": kind}
                observations.append(
                    {**observation, "event": event["type"], "object": event["object"]}
                )
