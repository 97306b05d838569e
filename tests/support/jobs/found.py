"""The StatefulSet ``llama`` of three pods as a search finds it, for tests without a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from chaoskit.attach.jobs.find import FoundJob, JobListing
from chaoskit.attach.jobs.membership import membership
from chaoskit.attach.jobs.reference import parse_reference
from chaoskit.attach.jobs.tracker import JobTracker
from support.jobs.objects import stateful_pod, stateful_set


def found_job(labels: Mapping[int, Mapping[str, str]] | None = None) -> FoundJob:
    """Return the job.

    Args:
        labels: index of a pod -> further labels of it.
    """
    objects = [stateful_pod(index, node=f"machine{index}") for index in range(3)]
    for index, more in (labels or {}).items():
        objects[index]["metadata"]["labels"] |= more
    members = membership(parse_reference("statefulset/llama"), stateful_set())
    listing = JobListing(stateful_set(), tuple(objects), 1, 0.0)
    tracker = JobTracker(members)
    listing.give_to(tracker)
    places = tracker.places()
    containers = {place.key: "trainer" for place in places.places}
    return FoundJob(members.reference, "ml", members, places, containers, listing)
