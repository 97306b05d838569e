"""Diagnosis of pods that do not run yet: the reasons, and those that make waiting useless.

-> ``pods.py`` and ``driver_pod.py`` show the reasons, and raise the error when waiting is useless.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NoReturn

from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.kubernetes.pods.state import (
    PULL_REASONS,
    Pending,
    has_ended,
    in_words,
    pending,
    pull_failure,
    taken_away,
)

_SHOWN_LINES = 20
#: A line that Python prints if chaoskit or one of its dependencies is missing, with the name of the
#: module. A job may miss other modules.
_NO_MODULE = re.compile(
    r"^(?:ModuleNotFoundError: |\S*python\S*: (?:Error while .*)?)No module named '?"
    r"((?:chaoskit|jinja2|kubernetes|msgspec|numpy|psutil|rich|torch|typer|xxhash|yaml)\b[\w.]*)",
    re.MULTILINE,
)
#: Reasons of a container whose program could not be started.
_NOT_STARTED = ("StartError", "RunContainerError", "ContainerCannotRun")
_NO_PROGRAM = re.compile(r"exec: .*(?:executable file not found|no such file or directory)")


class PodsBarred(HarnessError):
    """Error of pods that do not run for a lasting reason, which another attempt would meet."""


class PodDiagnosis:
    """Finder of the API server's reasons for which pods of a session do not run."""

    def __init__(self, api: KubernetesApi, session: str, options: KubernetesOptions) -> None:
        self._api, self._session, self._options = api, session, options

    def pending(
        self,
        stations: Iterable[str],
        places: Container[str] | None = None,
        made: Mapping[str, str] | None = None,
    ) -> list[Pending]:
        """Return the reasons for which pods do not run yet; none for a pod that runs.

        A silent API server is such a reason, too, so nothing is raised.

        Args:
            stations: stations whose pods are waited for.
            places: names of the pods that are waited for; None for all pods of these stations.
            made: name of a pod whose object was created -> its station. A pod that is missing was
                taken away.
        """
        station_names = set(stations)
        try:
            pods = list(self._api.find("Pod", manifests.selector(self._session)))
        except ApiError as error:
            return [
                Pending(", ".join(sorted(station_names)), "ApiServer", str(error), is_passing=True)
            ]
        all_labels = [pod["metadata"]["labels"] for pod in pods]
        reasons = [
            self._reason(labels.get(manifests.STATION, ""), pod)
            for labels, pod in zip(all_labels, pods, strict=True)
            if places is None or labels.get(manifests.PLACE, "") in places
        ]
        present = {labels.get(manifests.PLACE, "") for labels in all_labels}
        reasons += [
            taken_away(station, None)
            for place, station in (made or {}).items()
            if place not in present
        ]
        return [
            reason for reason in reasons if reason is not None and reason.station in station_names
        ]

    def _reason(self, station: str, pod: manifests.Manifest) -> Pending | None:
        """Return the reason for which a pod does not run, or None if there is no known reason."""
        reason = pending(station, pod)
        if reason is not None and reason.reason not in PULL_REASONS:
            return reason
        return self._pull_failure(station, pod) or reason  # events also count the attempts

    def _pull_failure(self, station: str, pod: manifests.Manifest) -> Pending | None:
        """Return the reason for which the image of a pod cannot be pulled, or None.

        Its machine reports an event at once. The status of the pod follows 10 to 15 s later.
        """
        if has_ended(pod) or not pod["spec"].get("nodeName"):
            return None
        try:
            events = self._api.events_about(pod["metadata"]["name"], "Failed")
        except ApiError:  # such as without the right to read events
            return None
        return pull_failure(station, events)

    def raise_not_running(
        self,
        reasons: Iterable[Pending],
        stations: Iterable[str],
        otherwise: str,
        *,
        is_late: bool = True,
    ) -> NoReturn:
        """Raise the error of pods that do not run.

        Args:
            reasons: the reasons of the API server.
            stations: stations whose logs are shown.
            otherwise: the problem to be reported if the server names no reason.
            is_late: True if the time to start is over.

        Raises:
            BadInput, HarnessError: always.
        """
        logs = [log for station in stations if (log := self.log(station))]
        raise not_running(list(reasons), logs, self._options, otherwise, is_late=is_late)

    def log(self, station: str) -> str:
        """Return the last 20 lines that each pod of a station has printed, or "".

        "" is returned, too, if the API server does not answer.
        """
        selector = f"{manifests.selector(self._session)},{manifests.STATION}={station}"
        try:
            names = [pod["metadata"]["name"] for pod in self._api.find("Pod", selector)]
        except ApiError:
            return ""
        return "\n".join(filter(None, (self._api.log(name, _SHOWN_LINES) for name in names)))


def not_running(
    reasons: Sequence[Pending],
    logs: Sequence[str],
    options: KubernetesOptions,
    otherwise: str,
    *,
    is_late: bool = True,
) -> BadInput | HarnessError:
    """Return the error of pods that do not run, with a remedy if the reason shows one.

    It is BadInput for a wrong option, and PodsBarred if another attempt would fail the same way.

    Args:
        reasons: the reasons of the API server.
        logs: output of the pods. See :meth:`PodDiagnosis.raise_not_running` for the others.
    """
    image = ("image", options.image) if options.image else ("template", options.template)
    waits = any(reason.reason == "Unschedulable" for reason in reasons)
    for match in filter(None, map(_NO_MODULE.search, () if waits else logs)):
        remedy = (
            "use an image with Python, torch and chaoskit[kubernetes], "
            f"and set {VARIABLE}PYTHON to its interpreter"
        )
        return BadInput(
            *image, f"{remedy}: its {options.python} has no {match[1].partition('.')[0]}"
        )
    text = in_words(reasons) or otherwise
    if any(
        reason.reason in _NOT_STARTED and _NO_PROGRAM.search(reason.message) for reason in reasons
    ):
        return BadInput(
            "python", options.python, f"name the Python of the image ({VARIABLE}PYTHON): {text}"
        )
    if any(
        reason.reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")
        for reason in reasons
    ):
        return BadInput(*image, f"name an image that machines can pull: {text}")
    since = (
        ""
        if not is_late or any(reason.is_final for reason in reasons)
        else f" after {options.startup_s:g} s"
    )
    if since and waits:
        text += (
            "; request less in the template, "
            f"or raise {VARIABLE}STARTUP_S if machines are added on demand"
        )
    printed = "".join(f"\n{log}" for log in logs[:1] if " ".join(log.split()) not in text)
    is_lasting = bool(reasons) and not any(reason.is_passing for reason in reasons)
    return (PodsBarred if is_lasting else HarnessError)(f"pods do not run{since}: {text}{printed}")
