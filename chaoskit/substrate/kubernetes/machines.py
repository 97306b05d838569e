"""The machines of a cluster, and which of them may be broken, by commands and rights of the user's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from chaoskit.errors import HarnessError
from chaoskit.substrate.errands import NotPutBack
from chaoskit.substrate.kubernetes import levers, manifests, marks
from chaoskit.substrate.kubernetes.api import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pod_state import has_ended
from chaoskit.substrate.undo import UndoLog

#: A label of machines that are never broken.
PROTECTED = "chaoskit.dev/protect"
_BACK_S, _LOOK_S = 600.0, 0.5
_NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


class Machines:
    """Breaks machines that the user has named, one at a time, and none on which anything else would be broken.

    Args:
        session: whose pods may be.
    """

    def __init__(self, api: KubernetesApi, session: str, options: KubernetesOptions, undo: UndoLog) -> None:
        self._api, self._session, self._options, self._undo = api, session, options, undo
        self._broken: set[str] = set()
        self._lock = threading.Lock()

    def do(self, name: str, machine: str) -> Callable[[], None]:
        """Pull a lever, or put a mark on; the machine is "" for a lever that is about none. Gives what puts it back.

        Raises:
            HarnessError: if that fails, or the machine may not be broken.
        """
        if name in marks.MARKS:
            return self._break(machine, lambda: marks.mark(self._api, name, machine, self._undo))
        lever = levers.read(self._options.levers).get(name) if self._options.levers else None
        if lever is None:
            raise HarnessError(f"there is no lever {name}: name one in the file of the option levers")
        if lever.is_for_machines is not bool(machine):
            raise HarnessError(f"lever {name} is {'' if lever.is_for_machines else 'not '}for machines")
        if not machine:
            return levers.pull(name, lever, "", self._undo)
        return self._break(machine, lambda: self._take(name, lever, machine))

    def _break(self, machine: str, act: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Break a machine, if none is broken."""
        with self._lock:
            self._require_breakable(machine)
            self._broken.add(machine)
            try:
                put_back = act()
            except NotPutBack:  # it is broken still
                raise
            except BaseException:
                self._broken.discard(machine)
                raise

        def done() -> None:
            put_back()
            self._broken.discard(machine)

        return done

    def _take(self, name: str, lever: levers.Lever, machine: str) -> Callable[[], None]:
        """Pull a lever; what puts the machine back waits until its kubelet is heard again, and pods may go there."""
        put_back = levers.pull(name, lever, machine, self._undo)

        def done() -> None:
            before = self._heard(machine)
            put_back()
            until_s = time.monotonic() + _BACK_S
            while (
                (heard := self._heard(machine)) is None
                or before is None
                or heard == before
                or not self._is_ready(machine)
            ):
                before = before or heard
                if time.monotonic() > until_s:
                    raise HarnessError(f"{machine} was put back, and is not heard after {_BACK_S:g} s")
                time.sleep(_LOOK_S)

        return done

    def _heard(self, machine: str) -> str | None:
        """When the API server has heard its kubelet last; None where it does not say.

        Raises:
            ApiError: if we may not ask it.
        """
        try:
            return str(self._api.get("Lease", machine)["spec"].get("renewTime", ""))
        except ApiError as error:
            if error.status == HTTPStatus.FORBIDDEN:
                raise
            return None

    def _is_ready(self, machine: str) -> bool:
        """Whether the scheduler would put pods there, which it learns some seconds after a kubelet is heard again."""
        try:
            return is_ready(self._api.get("Node", machine))
        except ApiError:
            return False

    def _require_breakable(self, machine: str) -> None:
        if machine not in self._options.breakable:
            raise HarnessError(f"{machine} may not be broken: name it in the option machines")
        if others := self._broken - {machine}:
            raise HarnessError(f"{machine} is left alone: {', '.join(sorted(others))} is broken still")
        try:
            if PROTECTED in self._api.get("Node", machine)["metadata"].get("labels", {}):
                raise HarnessError(f"{machine} may not be broken: it has the label {PROTECTED}")
            strangers = [] if self._options.strangers == "allow" else sorted(self._strangers(machine))
        except ApiError as error:
            raise HarnessError(f"whether {machine} may be broken cannot be told: {error}") from error
        if strangers:
            remedy = "drain it, or use the option strangers=allow"
            raise HarnessError(
                f"{machine} may not be broken: others' pods run there ({', '.join(strangers)}); {remedy}"
            )

    def _strangers(self, machine: str) -> Iterator[str]:
        """Pods of others there, but those that run on every machine."""
        for pod in self._api.pods_on(machine):
            metadata = pod["metadata"]
            is_ours = metadata.get("labels", {}).get(manifests.SESSION) == self._session
            if not (is_ours or _is_everywhere(metadata) or has_ended(pod)):
                yield f"{metadata['namespace']}/{metadata['name']}"


def is_ready(node: Mapping[str, Any]) -> bool:
    """Whether a node of the cluster is ready, and has none of the taints by which the cluster keeps pods off it."""
    conditions = node.get("status", {}).get("conditions", ())
    taints = node.get("spec", {}).get("taints", ())
    says_ready = any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)
    return says_ready and not any(one["key"] in _NOT_READY for one in taints)


def _is_everywhere(metadata: Mapping[str, Any]) -> bool:
    return any(one["kind"] in ("DaemonSet", "Node") for one in metadata.get("ownerReferences", ()))
