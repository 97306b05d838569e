"""The preview of a job that runs: its places, pods and ranks, and the hands that each pod admits.

Nothing is changed, unless ranks are to be read: then a hand is started in each pod.

-> attach/jobs/find.py looks the job up. attach/hands/start.py asks for hands. cli/machine/cluster.py
prints the preview.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

from chaoskit.attach.hands.hand_container import HAND_ROLES, PROCESSES, HandImage
from chaoskit.attach.hands.ranks import listed_ranks, why_unread
from chaoskit.attach.hands.start import HandPod, start_hand, why_no_hand
from chaoskit.attach.jobs.find import FoundJob, find_job
from chaoskit.attach.jobs.places import Place
from chaoskit.attach.required_rights import require_rights
from chaoskit.errors import HarnessError
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import HAND_RIGHTS

#: Pods that are asked at the same time.
_PARALLEL = 8


@dataclass(frozen=True, slots=True)
class PlacePreview:
    """A place of a job, as a user sees it before a fault.

    Attributes:
        place: the place in words, such as ``llama[1]``. Its index is not a rank.
        pod: name of the pod that holds it; "" if all of its pods have ended.
        uid: identifier of that pod.
        node: node of the pod.
        container: its container that trains.
        refusals: role of a hand -> why the pod does not admit it; "" if it does.
        ranks: ranks of its processes; empty if none was read.
        why_no_ranks: why ranks were to be read and are not known; "" otherwise.
    """

    place: str
    pod: str
    uid: str
    node: str
    container: str
    refusals: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    why_no_ranks: str = ""


@dataclass(frozen=True, slots=True)
class JobPreview:
    """A job that runs, as a user sees it before a fault.

    Attributes:
        job: the reference to the job.
        namespace: its namespace.
        note: text that users must see beside a job of this kind; "" for none.
        places: its places, in the order of their owners and indexes.
    """

    job: str
    namespace: str
    note: str
    places: tuple[PlacePreview, ...]


def preview_job(
    api: KubernetesApi,
    text: str,
    image: HandImage | None,
    *,
    container: str = "",
    reads_ranks: bool = False,
) -> JobPreview:
    """Return the preview of a job that runs in the namespace of a client.

    Args:
        api: client of the namespace.
        text: reference to the job, such as ``statefulset/llama``.
        image: the image of hands; None to ask for no hands.
        container: name of the container that trains; "" for the one that the rules of the kind
            select.
        reads_ranks: True to start a hand in each pod, which reads the ranks of its processes. Its
            container cannot be removed from the pod.

    Raises:
        BadInput: if the job cannot be broken as it is: see :func:`.jobs.find.find_job`.
        ApiError: if the server does not answer.
    """
    job = find_job(api, text, container=container)
    if image is not None:
        require_rights(api, HAND_RIGHTS)

    def preview(place: Place) -> PlacePreview:
        return _preview_place(api, job, place, image, reads_ranks=reads_ranks)

    with ThreadPoolExecutor(_PARALLEL) as pool:
        places = tuple(pool.map(preview, job.places.places))
    return JobPreview(str(job.reference), job.namespace, job.note, places)


def _preview_place(
    api: KubernetesApi, job: FoundJob, place: Place, image: HandImage | None, *, reads_ranks: bool
) -> PlacePreview:
    """Return the preview of a place. Raises ApiError."""
    if (state := place.pod) is None:
        return PlacePreview(str(place.key), "", "", "", "", why_no_ranks="its pods have ended")
    pod, container = HandPod(state.name, state.uid), job.containers[place.key]
    refusals: dict[str, str] = (
        {role: why_no_hand(api, pod, container, role, image) for role in HAND_ROLES}
        if image is not None
        else {}
    )
    ranks, why_no_ranks = tuple[int, ...](), ""
    if reads_ranks and image is not None:
        try:
            with closing(start_hand(api, pod, container, PROCESSES, image)) as hand:
                processes = hand.ask("list")["processes"]
            ranks = tuple(sorted({launched.rank for launched in listed_ranks(processes).values()}))
            why_no_ranks = "" if ranks else why_unread(processes)
        except HarnessError as error:
            why_no_ranks = str(error)
    return PlacePreview(str(place.key), *pod, state.node, container, refusals, ranks, why_no_ranks)
