"""Pods of a session that do not run yet: why, and when that is no use to wait for."""

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
#: What Python prints where a module is missing, with the name of the module.
#: What a Python without chaoskit, or without what it needs, prints at the begin of a line. Jobs may miss other modules.
_NO_MODULE = re.compile(
    r"^(?:ModuleNotFoundError: |\S*python\S*: (?:Error while .*)?)No module named '?"
    r"((?:chaoskit|jinja2|kubernetes|msgspec|numpy|psutil|rich|torch|typer|xxhash|yaml)\b[\w.]*)",
    re.MULTILINE,
)
#: Reasons of a container whose program could not be started.
_NOT_STARTED = ("StartError", "RunContainerError", "ContainerCannotRun")
_NO_PROGRAM = re.compile(r"exec: .*(?:executable file not found|no such file or directory)")


class PodsBarred(HarnessError):
    """Pods do not run for a reason that the cluster names, and that another attempt would meet again."""


class PodDiagnosis:
    """What the API server says of pods that are waited for."""

    def __init__(self, api: KubernetesApi, session: str, options: KubernetesOptions) -> None:
        self._api, self._session, self._options = api, session, options

    def pending(
        self,
        stations: Iterable[str],
        places: Container[str] | None = None,
        made: Mapping[str, str] | None = None,
    ) -> list[Pending]:
        """Return why pods do not run yet, as the API server has it; nothing where it does not answer.

        Args:
            places: names of those that are waited for; None for whatever belongs to these stations.
            made: stations of pods whose objects were made, by the names of these pods.
        """
        wanted = set(stations)
        try:
            found = list(self._api.find("Pod", manifests.selector(self._session)))
        except ApiError as error:
            return [Pending(", ".join(sorted(wanted)), "ApiServer", str(error), is_passing=True)]
        labels = [one["metadata"]["labels"] for one in found]
        told = [
            self._reason(label.get(manifests.STATION, ""), one)
            for label, one in zip(labels, found, strict=True)
            if places is None or label.get(manifests.PLACE, "") in places
        ]
        there = {label.get(manifests.PLACE, "") for label in labels}
        told += [
            taken_away(station, None)
            for place, station in (made or {}).items()
            if place not in there
        ]
        return [one for one in told if one is not None and one.station in wanted]

    def _reason(self, station: str, pod: manifests.Manifest) -> Pending | None:
        found = pending(station, pod)
        if found is not None and found.reason not in PULL_REASONS:
            return found
        return self._pull_failure(station, pod) or found  # events tell how often it was tried

    def _pull_failure(self, station: str, pod: manifests.Manifest) -> Pending | None:
        """That an image cannot be pulled. Its machine tells an event at once, and the pod's status 10 to 15 s later."""
        if has_ended(pod) or not pod["spec"].get("nodeName"):
            return None
        try:
            events = self._api.events_about(pod["metadata"]["name"], "Failed")
        except ApiError:  # such as for want of the right to read events
            return None
        return pull_failure(station, events)

    def raise_not_running(
        self,
        told: Iterable[Pending],
        stations: Iterable[str],
        otherwise: str,
        *,
        is_late: bool = True,
    ) -> NoReturn:
        """Give up.

        Args:
            otherwise: what is wrong where the server names no reason. is_late: whether the time to start is over.

        Raises:
            BadInput, HarnessError: always.
        """
        logs = [log for station in stations if (log := self.log(station))]
        raise not_running(list(told), logs, self._options, otherwise, is_late=is_late)

    def log(self, station: str) -> str:
        """The end of what a station's pods have printed."""
        wanted = f"{manifests.selector(self._session)},{manifests.STATION}={station}"
        try:
            names = [one["metadata"]["name"] for one in self._api.find("Pod", wanted)]
        except ApiError:
            return ""
        return "\n".join(filter(None, (self._api.log(name, _SHOWN_LINES) for name in names)))


def not_running(
    told: Sequence[Pending],
    logs: Sequence[str],
    options: KubernetesOptions,
    otherwise: str,
    *,
    is_late: bool = True,
) -> BadInput | HarnessError:
    """Return the error of pods that do not run, with its remedy where the reason shows one.

    Args:
        logs: what the pods have printed. See :meth:`PodDiagnosis.raise_not_running` for the others.
    """
    image = ("image", options.image) if options.image else ("template", options.template)
    waits = any(one.reason == "Unschedulable" for one in told)
    for match in filter(None, map(_NO_MODULE.search, () if waits else logs)):
        remedy = f"use one with Python, torch and chaoskit[kubernetes], and {VARIABLE}PYTHON for its interpreter"
        return BadInput(
            *image, f"{remedy}: {options.python} there has no {match[1].partition('.')[0]}"
        )
    reasons = in_words(told) or otherwise
    if any(one.reason in _NOT_STARTED and _NO_PROGRAM.search(one.message) for one in told):
        return BadInput(
            "python", options.python, f"name the Python of the image ({VARIABLE}PYTHON): {reasons}"
        )
    if any(one.reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName") for one in told):
        return BadInput(*image, f"name an image that machines can pull: {reasons}")
    since = (
        ""
        if not is_late or any(one.is_final for one in told)
        else f" after {options.startup_s:g} s"
    )
    if since and waits:
        reasons += f"; ask for less in the template, or raise {VARIABLE}STARTUP_S if machines are made on demand"
    printed = "".join(f"\n{log}" for log in logs[:1] if " ".join(log.split()) not in reasons)
    is_lasting = bool(told) and not any(one.is_passing for one in told)
    return (PodsBarred if is_lasting else HarnessError)(
        f"pods do not run{since}: {reasons}{printed}"
    )
