"""The machines of a cluster, the ones that may be broken, and the repair of broken ones.

``python -m chaoskit.substrate.kubernetes.machines.machines JSON`` removes the note from a machine.
The undo guard of a killed process runs it after the undo of the fault.

-> substrate/core/external_commands.py runs :meth:`Machines.do` in the background.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from chaoskit.substrate.kubernetes.pods.pod_placement import is_ready
from chaoskit.substrate.kubernetes.pods.state import has_ended
from chaoskit.substrate.undo import CommandEntry, UndoLog

#: Label of machines that are never broken.
PROTECTED = "chaoskit.dev/protect"
#: Annotation of a broken machine, with a :class:`BrokenMachine` as JSON.
BROKEN = "chaoskit.dev/broken"
#: Prefix of the names of runs on a job that already ran. They have no Job of their own, so that
#: another process cannot know that such a run is over.
ATTACHED = "attached-"
_BACK_S, _LOOK_S = 600.0, 0.5


class BrokenMachine(msgspec.Struct, frozen=True):
    """The annotation of a broken machine, with which any process can repair it.

    Attributes:
        session: namespace and name of the session or the attached run, with a slash between them.
        how: the mark or the lever that broke it.
    """

    session: str
    how: str


class Machines:
    """Breaks machines that the user has named, and only a single one at a time.

    A machine that runs pods of others is not broken, unless the option ``strangers`` allows it.

    Args:
        session: name of the session whose pods may run on a broken machine, or of an attached run.
        own_uids: returns the identifiers of the pods that may run on a broken machine; None for
            the pods of the session. It may raise ApiError.
    """

    def __init__(
        self,
        api: KubernetesApi,
        session: str,
        options: KubernetesOptions,
        undo: UndoLog,
        own_uids: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._api, self._session, self._options, self._undo = api, session, options, undo
        self._own_uids = own_uids
        self._broken: set[str] = set()
        self._lock = threading.Lock()

    def do(self, name: str, machine: str) -> Callable[[], None]:
        """Pull a lever or put on a mark, and return a function that undoes it.

        It returns when the command has ended. The undo of a lever on a machine waits until pods may
        run there again, for up to 10 minutes. An undo that fails raises HarnessError.

        Args:
            name: the lever or the mark.
            machine: the machine; "" for a lever that is for no machine.

        Raises:
            BadInput: if the file of levers is not valid.
            HarnessError: if that fails, or the machine may not be broken.
            NotPutBack: if it fails halfway, and the machine stays broken.
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
                f"there is no lever {name}: define it in the file of the option levers"
            )
        if lever.is_for_machines is not bool(machine):
            raise HarnessError(
                f"lever {name} is {'' if lever.is_for_machines else 'not '}for machines"
            )
        if not machine:
            return machine_commands.pull(name, lever, "", self._undo)
        return self._break(machine, name, lambda: self._pull_lever(name, lever, machine))

    def _break(
        self, machine: str, mark_or_lever: str, break_machine: Callable[[], Callable[[], None]]
    ) -> Callable[[], None]:
        """Break a machine if no other one is broken, and return a function that repairs it.

        A note of the fault is written on the machine first. Raises HarnessError.
        """
        with self._lock:
            self._require_breakable(machine, mark_or_lever)
            forget = self._note(machine, mark_or_lever)
            self._broken.add(machine)
            try:
                put_back = break_machine()
            except NotPutBack:  # the machine is still broken
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

    def _note(self, machine: str, mark_or_lever: str) -> Callable[[], None]:
        """Write a note of the fault on a machine, and return a function that removes it.

        The removal is recorded in the undo log. With a leftover note, a later session would undo
        the changes that people have made to the machine meanwhile.
        """
        arguments = json.dumps(
            {"machine": machine, "server": self._api.server, **self._api.arguments}
        )
        entry = self._undo.plan(
            CommandEntry(shlex.join([sys.executable, "-m", __name__, arguments]))
        )

        def forget() -> None:
            _annotate(self._api, machine, None)
            entry.done()

        try:
            _annotate(
                self._api,
                machine,
                BrokenMachine(f"{self._api.namespace}/{self._session}", mark_or_lever),
            )
        except ApiError:
            forget()
            raise
        return forget

    def _pull_lever(
        self, name: str, lever: machine_commands.Lever, machine: str
    ) -> Callable[[], None]:
        """Pull a lever, and return a function that undoes it.

        That function waits until the machine's kubelet has renewed its lease and pods may run
        there. It raises HarnessError if that takes over 10 minutes.
        """
        put_back = machine_commands.pull(name, lever, machine, self._undo)

        def done() -> None:
            before = self._last_heard(machine)
            put_back()
            until_s = time.monotonic() + _BACK_S
            while (
                (last_heard := self._last_heard(machine)) is None
                or before is None
                or last_heard == before
                or not self._is_ready(machine)
            ):
                before = before or last_heard
                if time.monotonic() > until_s:
                    raise HarnessError(
                        f"the fault of {machine} was undone, but its kubelet has not renewed its "
                        f"lease after {_BACK_S:g} s"
                    )
                time.sleep(_LOOK_S)

        return done

    def _last_heard(self, machine: str) -> str | None:
        """Return the time at which the machine's kubelet last renewed its lease.

        None is returned if the API server does not answer.

        Raises:
            ApiError: if the user may not read the lease.
        """
        try:
            return self._api.last_heard(machine)
        except ApiError as error:
            if error.status == HTTPStatus.FORBIDDEN:
                raise
            return None

    def _is_ready(self, machine: str) -> bool:
        """Return whether the scheduler would place pods there, as far as the API server answers.

        The scheduler does so some seconds after the kubelet has renewed its lease again.
        """
        try:
            return is_ready(self._api.get("Node", machine))
        except ApiError:
            return False

    def _require_breakable(self, machine: str, mark_or_lever: str) -> None:
        """Raise HarnessError if a machine may not be broken now."""
        if machine not in self._options.breakable:
            raise HarnessError(f"{machine} may not be broken: name it in the option machines")
        if others := self._broken - {machine}:
            raise HarnessError(
                f"{machine} is not broken: {', '.join(sorted(others))} is still broken"
            )
        if machine == self._options.own_machine:
            raise HarnessError(
                f"{machine} is not broken: the process that would have to repair it runs there"
            )
        try:
            reason = why_not_breakable_now(
                self._api, self._options, machine, [mark_or_lever], self._session, self._own_uids
            )
        except ApiError as error:
            raise HarnessError(f"it is unknown whether {machine} may be broken: {error}") from error
        if reason:
            raise HarnessError(reason)


def why_not_breakable_now(
    api: KubernetesApi,
    options: KubernetesOptions,
    machine: str,
    marks_or_levers: Iterable[str],
    session: str,
    own_uids: Callable[[], Collection[str]] | None = None,
) -> str:
    """Return the reason for which a machine may not be broken at present, or "" if it may.

    Args:
        marks_or_levers: marks and levers, for each of which it must be breakable.
        session: name of the session or the attached run; "" for a session without objects.
        own_uids: as in :class:`Machines`.

    Raises:
        ApiError: if the server refuses a request or does not answer.
    """
    node = api.get("Node", machine)
    pods = [] if options.strangers == "allow" else api.pods_on(machine)
    uids = own_uids() if own_uids is not None and pods else None
    for mark_or_lever in marks_or_levers:
        if reason := why_not_breakable(node, mark_or_lever, pods, api.namespace, session, uids):
            return reason
    return ""


def why_not_breakable(
    node: Mapping[str, Any],
    mark_or_lever: str,
    pods: Iterable[Mapping[str, Any]],
    namespace: str,
    session: str,
    own_uids: Collection[str] | None = None,
) -> str:
    """Return the reason for which a session may not break a machine, or "" if it may.

    Args:
        node: object of the machine.
        mark_or_lever: a mark or a lever.
        pods: the pods on the machine; none if others' pods do not matter.
        namespace: namespace of the session.
        session: name of the session; "" for a session that has no objects yet.
        own_uids: identifiers of the pods that are not others'; None for the pods of the session.
    """
    machine = node["metadata"]["name"]
    if PROTECTED in node["metadata"].get("labels", {}):
        return f"{machine} may not be broken: it has the label {PROTECTED}"
    if mark_or_lever in marks.MARKS and marks.has_mark(node, mark_or_lever):
        return f"{machine} has a {mark_or_lever} already"
    broken = _broken(node)
    if broken is not None and broken.session != f"{namespace}/{session}":
        remedy = f"if it works again: kubectl annotate node {machine} {BROKEN}-"
        return f"{machine} is not broken: session {broken.session} has broken it before; {remedy}"
    if strangers := sorted(_strangers(pods, session, own_uids)):
        remedy = "drain it, or use the option strangers=allow"
        return f"{machine} may not be broken: others' pods run there ({', '.join(strangers)}); {remedy}"
    return ""


def _strangers(
    pods: Iterable[Mapping[str, Any]], session: str, own_uids: Collection[str] | None
) -> Iterator[str]:
    """Yield the names of live pods that are others' and do not belong to every machine."""
    for pod in pods:
        metadata = pod["metadata"]
        is_own = (
            bool(session) and metadata.get("labels", {}).get(manifests.SESSION) == session
            if own_uids is None
            else metadata["uid"] in own_uids
        )
        if not (is_own or _is_everywhere(metadata) or has_ended(pod)):
            yield f"{metadata['namespace']}/{metadata['name']}"


@dataclass(frozen=True, slots=True)
class LeftMachine:
    """A machine that a former session has left broken, and the result of its repair.

    Attributes:
        text: description of the machine and its fault.
        is_back: True if the machine was repaired.
    """

    text: str
    is_back: bool

    def __str__(self) -> str:
        return f"{'put back' if self.is_back else 'left broken'}: {self.text}"


def put_back_left(api: KubernetesApi, options: KubernetesOptions) -> Iterator[LeftMachine]:
    """Repair machines that former sessions of this namespace have left broken, and yield them.

    The machines of the option ``machines`` are looked at. A machine that could not be repaired, or
    not be read, is yielded, too; nothing is raised. The repair takes place while the result is
    iterated over.

    A session leaves them, for instance, with the pod that ran pytest. The undo guards of these
    sessions do it sooner if they live.
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
                f"{machine} (or it is unknown whether a session has broken it): {error}",
                is_back=False,
            )


def _put_back(
    api: KubernetesApi, options: KubernetesOptions, machine: str, mark_or_lever: str
) -> None:
    """Undo a mark or a lever on a machine.

    Raises HarnessError if the lever is unknown or its undo fails.
    """
    if mark_or_lever in marks.MARKS:
        marks.take_off(api, mark_or_lever, machine)
        return
    lever = machine_commands.read(options.levers).get(mark_or_lever) if options.levers else None
    if lever is None:
        raise HarnessError(f"name a file with the lever {mark_or_lever} in the option levers")
    machine_commands.run_undo(mark_or_lever, lever, machine)


def _is_gone(api: KubernetesApi, session: str) -> bool:
    """Return whether a session belonged to this namespace and does not exist any more.

    That is unknown of an attached run, and False. Raises ApiError if the server does not answer.
    """
    namespace, _, name = session.partition("/")
    if namespace != api.namespace or name.startswith(ATTACHED):
        return False
    try:
        api.get("Job", name)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return True
    return False


def _annotate(api: KubernetesApi, machine: str, broken: BrokenMachine | None) -> None:
    """Write the annotation of a broken machine, or remove it if ``broken`` is None.

    Raises ApiError.
    """
    text = None if broken is None else msgspec.json.encode(broken).decode()
    api.patch("Node", machine, {"metadata": {"annotations": {BROKEN: text}}})


def _broken(node: Mapping[str, Any]) -> BrokenMachine | None:
    """Return the annotation of a broken machine, or None if there is no valid one."""
    annotation = node["metadata"].get("annotations", {}).get(BROKEN)
    try:
        return msgspec.json.decode(annotation, type=BrokenMachine) if annotation else None
    except msgspec.DecodeError:  # written by another program
        return None


def _is_everywhere(metadata: Mapping[str, Any]) -> bool:
    """Return whether a pod belongs to a DaemonSet or to its machine."""
    return any(
        owner["kind"] in ("DaemonSet", "Node") for owner in metadata.get("ownerReferences", ())
    )


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    api = KubernetesApi(arguments["context"], arguments["namespace"], arguments["kubeconfig"])
    if api.server != arguments["server"]:
        sys.exit(f"the machine is on {arguments['server']}, but the kubeconfig is for {api.server}")
    _annotate(api, arguments["machine"], None)
