"""The machines of a cluster, and which of them may be broken, by commands and rights of the user's.

``python -m chaoskit.substrate.kubernetes.machines.machines JSON`` removes the note from one, for the undo guard of a
killed
process: behind what it puts back.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from chaoskit.errors import ChaoskitError, HarnessError
from chaoskit.substrate.core.external_commands import NotPutBack
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.machines import machine_commands, marks
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.kubernetes.pods.placement import is_ready
from chaoskit.substrate.kubernetes.pods.state import has_ended
from chaoskit.substrate.undo import CommandEntry, UndoLog

#: A label of machines that are never broken.
PROTECTED = "chaoskit.dev/protect"
#: An annotation of a machine that is broken: by which session, and how it is put back.
BROKEN = "chaoskit.dev/broken"
_BACK_S, _LOOK_S = 600.0, 0.5


class BrokenMachine(msgspec.Struct, frozen=True):
    """What a machine says of itself while it is broken, so that it can be put back from anywhere.

    ``how``: a mark or a lever. ``session``: behind its namespace and a slash.
    """

    session: str
    how: str


class Machines:
    """Breaks machines that the user has named, one at a time, and none on which anything else would be broken.

    Args:
        session: whose pods may be.
    """

    def __init__(
        self, api: KubernetesApi, session: str, options: KubernetesOptions, undo: UndoLog
    ) -> None:
        self._api, self._session, self._options, self._undo = api, session, options, undo
        self._broken: set[str] = set()
        self._lock = threading.Lock()

    def do(self, name: str, machine: str) -> Callable[[], None]:
        """Pull a lever, or put a mark on; the machine is "" for a lever that is about none. Gives what puts it back.

        Raises:
            HarnessError: if that fails, or the machine may not be broken.
        """
        if name in marks.MARKS:
            return self._break(
                machine, name, lambda: marks.mark(self._api, name, machine, self._undo)
            )
        lever = (
            machine_commands.read(self._options.levers).get(name) if self._options.levers else None
        )
        if lever is None:
            raise HarnessError(
                f"there is no lever {name}: name one in the file of the option levers"
            )
        if lever.is_for_machines is not bool(machine):
            raise HarnessError(
                f"lever {name} is {'' if lever.is_for_machines else 'not '}for machines"
            )
        if not machine:
            return machine_commands.pull(name, lever, "", self._undo)
        return self._break(machine, name, lambda: self._take(name, lever, machine))

    def _break(
        self, machine: str, how: str, act: Callable[[], Callable[[], None]]
    ) -> Callable[[], None]:
        """Break a machine, if none is broken."""
        with self._lock:
            self._require_breakable(machine, how)
            forget = self._note(machine, how)
            self._broken.add(machine)
            try:
                put_back = act()
            except NotPutBack:  # it is broken still
                raise
            except BaseException:
                self._broken.discard(machine)
                forget()
                raise

        def done() -> None:
            put_back()
            forget()
            self._broken.discard(machine)

        return done

    def _note(self, machine: str, how: str) -> Callable[[], None]:
        """Write on a machine what is done to it, and how that note goes again. Gives what removes it.

        A note that stayed would have a later session undo what people have done to the machine meanwhile.
        """
        told = json.dumps({"machine": machine, "server": self._api.server, **self._api.arguments})
        entry = self._undo.plan(CommandEntry(shlex.join([sys.executable, "-m", __name__, told])))

        def forget() -> None:
            _annotate(self._api, machine, None)
            entry.done()

        try:
            _annotate(
                self._api, machine, BrokenMachine(f"{self._api.namespace}/{self._session}", how)
            )
        except ApiError:
            forget()
            raise
        return forget

    def _take(self, name: str, lever: machine_commands.Lever, machine: str) -> Callable[[], None]:
        """Pull a lever; what puts the machine back waits until its kubelet is heard again, and pods may go there."""
        put_back = machine_commands.pull(name, lever, machine, self._undo)

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
                    raise HarnessError(
                        f"{machine} was put back, and is not heard after {_BACK_S:g} s"
                    )
                time.sleep(_LOOK_S)

        return done

    def _heard(self, machine: str) -> str | None:
        """When the API server has heard its kubelet last; None where it does not say.

        Raises:
            ApiError: if we may not ask it.
        """
        try:
            return self._api.last_heard(machine)
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

    def _require_breakable(self, machine: str, how: str) -> None:
        if machine not in self._options.breakable:
            raise HarnessError(f"{machine} may not be broken: name it in the option machines")
        if others := self._broken - {machine}:
            raise HarnessError(
                f"{machine} is left alone: {', '.join(sorted(others))} is broken still"
            )
        if machine == self._options.own_machine:
            raise HarnessError(
                f"{machine} is left alone: the process that would have to put it back runs there"
            )
        try:
            node = self._api.get("Node", machine)
            pods = [] if self._options.strangers == "allow" else self._api.pods_on(machine)
        except ApiError as error:
            raise HarnessError(
                f"whether {machine} may be broken cannot be told: {error}"
            ) from error
        if reason := why_not_breakable(node, how, pods, self._api.namespace, self._session):
            raise HarnessError(reason)


def why_not_breakable(
    node: Mapping[str, Any],
    how: str,
    pods: Iterable[Mapping[str, Any]],
    namespace: str,
    session: str,
) -> str:
    """Return why a machine is left alone by a session; "" if it may be broken.

    Args:
        how: a mark or a lever. pods: those on the machine, unless it does not matter whose they are.
        session: its name; "" for a session that has made nothing yet.
    """
    machine = node["metadata"]["name"]
    if PROTECTED in node["metadata"].get("labels", {}):
        return f"{machine} may not be broken: it has the label {PROTECTED}"
    if how in marks.MARKS and marks.has_mark(node, how):
        return f"{machine} has a {how} already"
    broken = _broken(node)
    if broken is not None and broken.session != f"{namespace}/{session}":
        remedy = f"if it is whole: kubectl annotate node {machine} {BROKEN}-"
        return f"{machine} is left alone: session {broken.session} has broken it; {remedy}"
    if strangers := sorted(_strangers(pods, session)):
        remedy = "drain it, or use the option strangers=allow"
        return f"{machine} may not be broken: others' pods run there ({', '.join(strangers)}); {remedy}"
    return ""


def _strangers(pods: Iterable[Mapping[str, Any]], session: str) -> Iterator[str]:
    """Yield the names of pods that are of no session of this name, and do not run on every machine."""
    for pod in pods:
        metadata = pod["metadata"]
        is_ours = bool(session) and metadata.get("labels", {}).get(manifests.SESSION) == session
        if not (is_ours or _is_everywhere(metadata) or has_ended(pod)):
            yield f"{metadata['namespace']}/{metadata['name']}"


@dataclass(frozen=True, slots=True)
class LeftMachine:
    """What a session that is gone has left broken; whether it is put back now."""

    told: str
    is_back: bool

    def __str__(self) -> str:
        return f"{'put back' if self.is_back else 'left broken'}: {self.told}"


def put_back_left(api: KubernetesApi, options: KubernetesOptions) -> Iterator[LeftMachine]:
    """Put back machines that sessions of this namespace have broken that are gone, as with a pod that ran pytest.

    Their guards do it sooner, where these live.
    """
    for machine in options.breakable:
        try:
            broken = _broken(api.get("Node", machine))
            if broken is None or not _is_gone(api, broken.session):
                continue
            _put_back(api, options, machine, broken.how)
            _annotate(api, machine, None)
            yield LeftMachine(
                f"{machine}, which session {broken.session} has broken: {broken.how}", is_back=True
            )
        except ChaoskitError as error:
            yield LeftMachine(
                f"{machine}, or whether a session has broken it cannot be told: {error}",
                is_back=False,
            )


def _put_back(api: KubernetesApi, options: KubernetesOptions, machine: str, how: str) -> None:
    if how in marks.MARKS:
        marks.take_off(api, how, machine)
        return
    lever = machine_commands.read(options.levers).get(how) if options.levers else None
    if lever is None:
        raise HarnessError(f"name a file with the lever {how} in the option levers")
    machine_commands.push_back(how, lever, machine)


def _is_gone(api: KubernetesApi, session: str) -> bool:
    """Whether a session was of this namespace, and is there no more."""
    namespace, _, name = session.partition("/")
    if namespace != api.namespace:
        return False
    try:
        api.get("Job", name)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return True
    return False


def _annotate(api: KubernetesApi, machine: str, broken: BrokenMachine | None) -> None:
    """Write on a machine that it is broken; None: that it is not. Raises ApiError."""
    value = None if broken is None else msgspec.json.encode(broken).decode()
    api.patch("Node", machine, {"metadata": {"annotations": {BROKEN: value}}})


def _broken(node: Mapping[str, Any]) -> BrokenMachine | None:
    told = node["metadata"].get("annotations", {}).get(BROKEN)
    try:
        return msgspec.json.decode(told, type=BrokenMachine) if told else None
    except msgspec.DecodeError:  # written by another program
        return None


def _is_everywhere(metadata: Mapping[str, Any]) -> bool:
    return any(one["kind"] in ("DaemonSet", "Node") for one in metadata.get("ownerReferences", ()))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    there = KubernetesApi(given["context"], given["namespace"], given["kubeconfig"])
    if there.server != given["server"]:
        sys.exit(f"the machine is of {given['server']}, and the kubeconfig is of {there.server}")
    _annotate(there, given["machine"], None)
