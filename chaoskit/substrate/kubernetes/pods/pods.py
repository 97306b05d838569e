"""The pods of a session, by station: how they are created and waited for, replaced and ended.

Methods that wait for pods block their thread. They touch no stream that an event loop reads, so
they may run in another thread while the loop goes on (:meth:`SessionPods.replace`).

-> kubernetes/pods/diagnosis.py: why a pod does not run; disruption.py: what else ended it;
pod_placement.py: which machines are avoided.
-> kubernetes/substrate.py notices silent pods during a run, and asks for the replacement.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any

from chaoskit.errors import HarnessError
from chaoskit.plaintext import same_but_ports
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.kubernetes.api.background import BackgroundRequests
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests, pod_placement
from chaoskit.substrate.kubernetes.pods.actions import ANSWER_S
from chaoskit.substrate.kubernetes.pods.diagnosis import PodDiagnosis
from chaoskit.substrate.kubernetes.pods.disruption import Disruption, disruption_of, loss_of_machine
from chaoskit.substrate.kubernetes.pods.pod_blocker import Blocker, How
from chaoskit.substrate.kubernetes.pods.state import (
    PULL_REASONS,
    Pending,
    has_ended,
    in_words,
    why_not_preempting,
)
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.reception import Arrival, Reception
from chaoskit.substrate.supervisor.remote_node import KernelAway

_LOOK_S = 0.5  # interval of checks of pods that have not come
_WARM_S = 120.0
_END_S = 30.0
_END_LOOK_S = 0.02
ASK_AGAIN_S = 0.1  # interval of questions to the API server about a pod
_EXAMINE_AGAIN_S = 1.0  # interval of questions about an end that the API server cannot explain yet
#: Station of a pod that is created to take the place of another one on its machine.
PREEMPTOR = "preemptor"


class Pod:
    """A pod, and the streams that come from it.

    Args:
        ask_over: returns True if no process of the pod runs any more; asked once its stream has
            ended.

    Attributes:
        station: node, coordinator or standby that it serves.
        place: name that its supervisor and its label give; never used again. The object of the pod
            has the same name, unless a Job made it.
        link: the link to its supervisor; None until that has connected.
        helper: the link to its network helper; None if it has none.
        address: address of its processes; "" until its supervisor has connected.
        machine: machine on which it runs; "" if it is unknown.
        is_made: True if this session has created its object itself.
        kernel: kernel of its processes, queried through its supervisor.
        end_requested: True if this session has requested its end.
        blocker: the blocker that keeps it from running, if there is one.
        is_displaced: True if it would be elsewhere if no machine had been lost.
        fell_silent: True if it counts as lost because its supervisor did not answer.
        ends_by_plan: True if this session ends it, or breaks its machine.
        first_sign_ns: monotonic time at which its end was noticed; 0 if it was not.
        disruption: the disruption that ended it, if this session has not requested its end.
        examined_s: monotonic time of the last question why it went; infinite if that is known.
        asked_s: monotonic time of the last question to the API server whether it is over.
        was_over: answer to that question.
    """

    def __init__(self, station: str, place: str, ask_over: Callable[[Pod], bool]) -> None:
        self.station = station
        self.place = place
        self.address = ""
        self.machine = ""
        self.kernel = KernelAway(lambda: ask_over(self))
        self.link: SupervisorLink | None = None
        self.helper: SupervisorLink | None = None
        self.blocker: Blocker | None = None
        self.is_made = self.end_requested = False
        self.is_displaced = False
        self.fell_silent = False
        self.ends_by_plan = False
        self.first_sign_ns = 0
        self.disruption: Disruption | None = None
        self.examined_s = -math.inf
        self.is_machine_examined = False  # or is being examined: its machine is examined once
        self.examining = threading.Lock()
        self.was_over = False
        self.asked_s = -math.inf

    def connect(self, place: str, arrival: Arrival) -> None:
        """Take the connection of its supervisor, or of its helper, which has a place of its own.

        That of the supervisor also gives the address and the machine.
        """
        if place != self.place:
            self.helper = SupervisorLink(
                arrival.connection, f"the network helper of {self.station}"
            )
            return
        self.address, self.machine = arrival.address, arrival.machine
        self.link = SupervisorLink(
            arrival.connection, f"the supervisor of {self.station}", self.kernel
        )
        self.kernel.reach_by(self.link)

    def move_to(self, station: str) -> None:
        """Change the station that this pod serves, also in the messages about its supervisor."""
        self.station = station
        if self.link is not None:
            self.link.name = f"the supervisor of {station}"

    @property
    def stands_by(self) -> bool:
        """True if it serves no node yet."""
        return self.station.startswith(manifests.STANDBY)

    def lives(self) -> bool:
        """Return whether the stream to its supervisor is open."""
        return self.link is not None and self.link.is_open()

    def leaves(self) -> bool:
        """Return whether its end was requested, or its supervisor has received SIGTERM."""
        return self.end_requested or (self.link is not None and self.link.leaves)

    @property
    def role(self) -> str:
        """The role of its processes in a run: ``node``, ``coordinator`` or ``standby``."""
        return (
            COORDINATOR if self.station == COORDINATOR else "standby" if self.stands_by else "node"
        )

    def note_end(self) -> None:
        """Note the time if its processes end or have ended.

        This reads the link to the supervisor, so it must not be called from another thread.
        """
        if (
            not self.first_sign_ns
            and self.link is not None
            and (self.link.leaves or not self.link.is_open())
        ):
            self.first_sign_ns = time.monotonic_ns()

    def is_unexplained(self) -> bool:
        """Return whether its end has begun without a request of this session or a known reason."""
        is_requested = self.ends_by_plan or self.end_requested
        return bool(self.first_sign_ns) and not is_requested and self.examined_s < math.inf

    def disconnect(self) -> None:
        """Close the links to its supervisor and its helper. This ends all processes below them."""
        for link in (self.link, self.helper):
            if link is not None:
                link.close()


class SessionPods:
    """Creates the pods of a session, and maps each station to its pod.

    A pod is *lost* when its stream has ended, or its supervisor does not answer. A lost pod is
    *replaced* by one that stands by, else by a new one, never on a machine that has fallen silent.

    Args:
        session: name of the session.
        reception: the listener that supervisors connect to.
        runner: the address that they dial.
        manifest: called with station and place; returns the object of a pod, without its placement
            on machines.
        tell: shows a line to the user: why pods are waited for.
        background: makes requests that no run waits for: labels and annotations. It makes no
            deletions.

    Attributes:
        diagnosis: finds the reasons for which pods do not run.
    """

    def __init__(
        self,
        api: KubernetesApi,
        session: str,
        options: KubernetesOptions,
        reception: Reception,
        runner: str,
        manifest: Callable[[str, str], manifests.Manifest],
        tell: Callable[[str], None],
        background: BackgroundRequests,
    ) -> None:
        self._api, self._session, self._options = api, session, options
        self._reception, self._runner, self._manifest, self._tell = (
            reception,
            runner,
            manifest,
            tell,
        )
        self._background = background
        self.diagnosis = PodDiagnosis(api, session, options)
        self._by_station: dict[str, Pod] = {}
        self._lost, self._returning = pod_placement.LostMachines(), set[str]()
        self._blocker: Blocker | None = None
        self._disrupted: list[Pod] = []  # pods disrupted by something else, and not recorded yet
        self._unproven: dict[Pod, _MachineWatch] = {}  # unexplained ends; the machine may be lost
        # the cluster may have pods that are not known here, such as those of an earlier driver
        self._may_have_unknown_pods = True
        self._tidying = ThreadPoolExecutor(1, thread_name_prefix="ck-tidy")  # only for deletions

    # -- the present pods --------------------------------------------------------------------------

    def get(self, station: str) -> Pod | None:
        """Return the pod of a station, or None if it has none."""
        return self._by_station.get(station)

    def all(self) -> Sequence[Pod]:
        """Return the pods of all stations."""
        return tuple(self._by_station.values())

    def running(self, node: str) -> Pod:
        """Return the pod of a node for a fault.

        Raises:
            ProcessLookupError: if the pod is gone or going. Its end would not be the effect of the
                fault.
        """
        pod = self.get(node)
        if pod is None or not pod.lives() or pod.leaves():
            raise ProcessLookupError(f"the pod of {node} is gone, or is ending")
        return pod

    def on(self, machine: str) -> Sequence[Pod]:
        """Return the pods on a machine."""
        return tuple(pod for pod in self.all() if pod.machine == machine)

    def add(self, pod: Pod) -> None:
        """Make a pod the pod of its station."""
        self._by_station[pod.station] = pod

    def is_lost(self, station: str) -> bool:
        """Return whether a station has no live pod, or one on a machine that has fallen silent."""
        pod = self.get(station)
        return pod is None or not pod.lives() or self._is_avoided(pod.machine)

    def _is_avoided(self, machine: str) -> bool:
        """Return whether no pod is to be created on a machine now, as it has fallen silent."""
        return machine in self._lost.avoided(time.monotonic())

    # -- before a run ------------------------------------------------------------------------------

    def expect_back(self, machine: str) -> None:
        """Note that a lost machine will be back by the next run, which may use it again.

        The command that puts the machine back waits for that.
        """
        self._returning.add(machine)

    def settle_in(self) -> None:
        """Forget and delete every pod that does not serve the next run.

        Such pods are lost or ending, were displaced from a machine that is back, or came too late.
        Pods of a driver that was killed are deleted as well.

        Raises:
            ApiError: if pods must be deleted or looked for, and the server refuses or is silent.
        """
        for machine in self._returning:
            self._lost.note_back(machine)
        self._returning.clear()
        self._blocker = None
        has_all_machines = not self._lost.avoided(time.monotonic())
        for pod in self.all():
            # plans of the run before do not count any more
            pod.ends_by_plan = pod.end_requested or pod.fell_silent
            if not self.serves(pod) or (pod.is_displaced and has_all_machines):
                self._forget(pod)
                self._may_have_unknown_pods = pod.ends_by_plan = True
                self._api.delete("Pod", pod.place, grace_s=0)
        if self._may_have_unknown_pods:
            self._may_have_unknown_pods = False
            try:
                self._delete_unknown_pods()
            except BaseException:
                self._may_have_unknown_pods = True
                raise

    def _delete_unknown_pods(self) -> None:
        """Delete the pods of this session that are not known here. Raises ApiError."""
        places = {pod.place for pod in self.all()}
        selector = (
            f"{manifests.selector(self._session)},{manifests.STATION}!={manifests.DRIVER_STATION}"
        )
        for pod in self._api.find("Pod", selector):
            if pod["metadata"]["labels"].get(manifests.PLACE) not in places:
                self._api.delete("Pod", pod["metadata"]["name"], grace_s=0)

    def serves(self, pod: Pod) -> bool:
        """Return whether another run can use a pod.

        The pod must live, have its helper if it needs one, and not be ending.
        """
        is_starting = pod.link is None or not pod.link.await_ready(0.0)
        has_helper = pod.helper is not None and pod.helper.is_open()
        is_complete = has_helper or is_starting or self._options.network_faults != "allow"
        return pod.lives() and is_complete and not pod.leaves()

    def drop_standbys(self, beyond: Collection[str]) -> None:
        """Forget and delete the standbys whose stations are not in ``beyond``.

        Otherwise a run without standbys would take one.
        """
        for pod in self.all():
            if pod.stands_by and pod.station not in beyond:
                self._forget(pod)
                self._tidying.submit(self._drop, pod)

    def find_silent(self) -> None:
        """Ping every started supervisor, and note the pods that do not answer as silent.

        If none answers, this process is assumed to have no network, and only closes the links.
        """
        ready = [
            (pod, pod.link)
            for pod in self.all()
            if pod.link is not None and pod.link.await_ready(0.0)
        ]
        pings = [(pod, link, link.ask_alive()) for pod, link in ready if link.is_open()]
        until_s = time.monotonic() + ANSWER_S
        silent = [
            pod
            for pod, link, last_sign in pings
            if not link.await_sign(last_sign, until_s - time.monotonic())
        ]
        for pod in silent:
            if len(silent) < len(pings):
                pod.ends_by_plan = True  # its end is no finding of a run
                self.note_silent(pod)
            else:
                pod.disconnect()

    def ensure_pods(self, stations: Iterable[str]) -> None:
        """Ensure that each station has a pod with a supervisor that can start programs.

        Raises:
            BadInput: if no such pod can be created.
            HarnessError: if a pod does not run in time, with the reason.
        """
        pods = [self.new_pod(station) for station in stations if station not in self._by_station]
        try:
            for pod in pods:
                self._create(pod)
                self.add(pod)
            self.await_arrivals(pods)
            for pod in self.all():
                self._await_ready(pod)
        except BaseException:
            for pod in pods:
                if not pod.lives():
                    self._forget(pod)  # the next run creates another one
            self._may_have_unknown_pods = True
            raise

    # -- creation of a pod -------------------------------------------------------------------------

    def new_pod(self, station: str) -> Pod:
        """Return a pod with a new name, which is not created yet. Its supervisor may connect."""
        pod = Pod(station, f"{self._session}-{station}-{secrets.token_hex(3)}", self.is_over)
        self.expect(pod)
        return pod

    def expect(self, pod: Pod) -> None:
        """Allow the supervisor and the helper of a pod to connect."""
        for place in self._places(pod):
            self._reception.expect(place)

    def _places(self, pod: Pod) -> list[str]:
        """Return the places of a pod's supervisor and, if it has one, of its helper."""
        has_helper = self._options.network_faults == "allow"
        return [pod.place, *([manifests.helper_place(pod.place)] if has_helper else [])]

    def _create(self, pod: Pod) -> None:
        """Create the object of a pod, away from lost machines. Raises ApiError."""
        manifest = self._manifest(pod.station, pod.place)
        avoided = self._lost.avoided(time.monotonic())
        pod.is_displaced = bool(avoided)
        if avoided:
            pod_placement.keep_off(manifest, avoided)
        elif pod.station != COORDINATOR and not pod.stands_by:
            pod_placement.only_on(manifest, self._options.breakable)
        is_blocked = self._blocker is not None and not self._blocker.is_lifted
        # the run needs its coordinator
        if self._blocker is not None and is_blocked and pod.station != COORDINATOR:
            pod.blocker = self._blocker
            pod.blocker.block(manifest)
        try:
            self._api.create(manifest)
        except ApiError as error:
            # without the name of this attempt, so that equal reasons are shown once
            raise ApiError(
                str(error).replace(pod.place, pod.station), error.status, error.causes
            ) from None
        pod.is_made = True

    def await_arrivals(
        self, pods: Sequence[Pod], is_run_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until the supervisors and helpers of pods have connected.

        The user is shown the reasons for which pods do not run yet.

        Raises:
            BadInput, HarnessError: if they do not connect in time, with the reason, or the run is
                over.
        """
        missing = {place: pod for pod in pods for place in self._places(pod)}
        until_s, shown_text = time.monotonic() + self._options.startup_s, ""
        while missing:
            if (arrived := self._reception.await_any(missing, _LOOK_S)) is not None:
                pod = missing.pop(arrived[0])
                pod.connect(*arrived)
                self._lost.note_back(pod.machine)
                continue
            if is_run_over():
                raise HarnessError("the run is over")
            absent = {pod.station: pod for pod in missing.values()}
            reasons = self.diagnosis.pending(absent, missing, self._made(absent))
            is_blocked = _report_to_blockers(absent, reasons)
            if reasons and not same_but_ports(text := in_words(reasons), shown_text):
                self._tell(shown_text := text)
            # the image of a blocked pod is waited for: the fault may be lifted
            is_final = any(
                reason.is_final and not (is_blocked and reason.reason in PULL_REASONS)
                for reason in reasons
            )
            if time.monotonic() > until_s or is_final:
                if is_blocked:  # the user's options are correct
                    raise HarnessError(f"pods do not run: {shown_text}")
                otherwise = (
                    f"no supervisor has connected to {self._runner}: "
                    "check that pods can reach this address"
                )
                self.diagnosis.raise_not_running(reasons, list(absent), otherwise)

    @staticmethod
    def _made(absent: Mapping[str, Pod]) -> dict[str, str]:
        """Return place -> station of the absent pods whose objects this session has created."""
        return {pod.place: station for station, pod in absent.items() if pod.is_made}

    def _await_ready(self, pod: Pod, is_run_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until the supervisor of a pod can start programs.

        Raises:
            HarnessError: if it cannot in time, or the run is over.
        """
        until_s = time.monotonic() + _WARM_S
        while pod.link is None or not pod.link.await_ready(_LOOK_S):
            if is_run_over():
                raise HarnessError("the run is over")
            if not pod.lives() or time.monotonic() > until_s:
                self.require_there([pod])
                log = self.diagnosis.log(pod.station)
                raise HarnessError(f"the supervisor of {pod.station} did not start:\n{log}")

    def require_there(self, pods: Iterable[Pod]) -> None:
        """Raise HarnessError, with the proof, if something else ended one of these pods."""
        for pod in pods:
            pod.note_end()
            with contextlib.suppress(ApiError):
                self.examine(pod)
            if pod.disruption is not None:
                raise HarnessError(
                    f"before the first step the pod of {pod.station} was {pod.disruption}"
                )

    # -- during a run ------------------------------------------------------------------------------

    def replace(
        self,
        station: str,
        is_run_over: Callable[[], bool] = lambda: False,
        prepare: Callable[[SupervisorLink], None] = lambda link: None,
    ) -> None:
        """Give a station whose pod is lost another one: a standby, else a new pod.

        The stream of the lost one must have ended. This takes seconds if a pod is created.

        Args:
            is_run_over: returns True once the pod is not needed any more.
            prepare: called with the link of the pod before the station gets it.

        Raises:
            ApiError, BadInput, HarnessError: if no pod can be created now, it does not run in time,
                or the run is over. An error of ``prepare`` is raised, too; the pod is deleted then.
        """
        if is_run_over():
            raise HarnessError("the run is over")
        if (former := self.get(station)) is not None:
            former.note_end()
            self._forget(former)
            self._tidying.submit(self._drop, former)
        while (standby := self._take_standby()) is not None:
            if standby.link is not None and standby.link.await_sign(
                standby.link.ask_alive(), ANSWER_S
            ):
                try:
                    prepare(standby.link)
                except BaseException:
                    self._forget(standby)
                    self._tidying.submit(self._drop, standby)
                    raise
                standby.move_to(station)
                standby.is_displaced = bool(self._options.breakable) and station != COORDINATOR
                self.add(standby)
                self.label(station, manifests.station_labels(station))
                return
            self.note_silent(standby)
        pod = self.new_pod(station)
        try:
            self._create(pod)
            self.await_arrivals([pod], is_run_over)
            self._await_ready(pod, is_run_over)
            assert pod.link is not None
            prepare(pod.link)
        except BaseException:
            self._forget(pod)
            self._may_have_unknown_pods = True  # the server may still create it
            self._tidying.submit(self._drop, pod)
            raise
        self.add(pod)

    def _take_standby(self) -> Pod | None:
        """Return a live standby and remove it from the stations, or return None if there is none.

        Standbys that do not live, end, or are on a machine to avoid are dropped.
        """
        for pod in self.all():
            if pod.stands_by and self._by_station.pop(pod.station, None) is pod:
                if pod.lives() and not pod.leaves() and not self._is_avoided(pod.machine):
                    return pod
                self._forget(pod)
                self._tidying.submit(self._drop, pod)
        return None

    def note_silent(self, pod: Pod, since_ns: int = 0) -> None:
        """Note that the supervisor of a pod does not answer: the pod is lost, and is deleted.

        Its links are closed, and for a while no pod is created on its machine.

        Args:
            since_ns: monotonic time of the first question without an answer; 0 for now.
        """
        pod.first_sign_ns = pod.first_sign_ns or since_ns or time.monotonic_ns()
        self._lost.note_lost(pod.machine, time.monotonic())
        pod.fell_silent = True
        pod.disconnect()
        self._tidying.submit(self._drop, pod)

    def _forget(self, pod: Pod) -> None:
        """Remove a pod from its station, close its links, and refuse new connections from it."""
        if self.get(pod.station) is pod:
            del self._by_station[pod.station]
        for place in self._places(pod):
            self._reception.give_up(place)
        pod.disconnect()

    def _drop(self, pod: Pod) -> None:
        """Delete a pod. If that fails, it is deleted before the next run (:meth:`settle_in`)."""
        try:
            self.delete(pod, 0)
        except ApiError:
            self._may_have_unknown_pods = True

    def label(
        self,
        station: str,
        labels: Mapping[str, str | None],
        annotations: Mapping[str, str | None] | None = None,
    ) -> None:
        """Queue a change of a pod's labels and annotations; None removes one.

        Nothing is done if the station has no pod.
        """
        if (pod := self.get(station)) is not None:
            change = {"metadata": {"labels": labels, "annotations": annotations or {}}}
            key = (pod.place, frozenset(labels))
            self._background.submit(partial(self._api.patch, "Pod", pod.place, change), key)

    # -- faults ------------------------------------------------------------------------------------

    def delete(self, pod: Pod, grace_s: int) -> None:
        """Delete a pod without waiting for its end. Raises ApiError.

        If it ends already, the API server is first asked why. From now on its end is planned,
        unless the request is refused.

        Args:
            grace_s: seconds that its processes get to end by themselves.
        """
        # afterwards the reason of an unplanned end is lost
        self.examine(pod, at_once=True)
        with self._ending(pod):
            self._api.delete("Pod", pod.place, grace_s=grace_s)

    def evict(self, pod: Pod, grace_s: int) -> None:
        """Evict a pod without waiting for its end, which is planned unless the request is refused.

        Raises ApiError. If a PodDisruptionBudget forbids it, ``is_budget_refusal`` of that is True.

        Args:
            grace_s: seconds that its processes get to end by themselves.
        """
        with self._ending(pod):
            self._api.evict(pod.place, grace_s)

    @contextlib.contextmanager
    def _ending(self, pod: Pod) -> Iterator[None]:
        """Mark a pod as ending by plan during a request.

        Its supervisor may report the end before the API server has answered.
        """
        before, pod.ends_by_plan = pod.ends_by_plan, True
        try:
            yield
        except ApiError as error:
            # after other errors the server may have ended it
            if error.is_refusal or error.is_budget_refusal:
                pod.ends_by_plan = before
            raise
        pod.end_requested = True

    # -- disruptions by others ---------------------------------------------------------------------

    def examine_all(self, stations: Iterable[str]) -> None:
        """Examine the pods of stations, and machines. Stop when the API server does not answer.

        Nothing is raised. :meth:`pop_disrupted` returns the pods whose end is explained.
        """
        for pod in filter(None, map(self.get, stations)):
            try:
                self.examine(pod)
            except ApiError as error:
                if error.is_silence:
                    return
        self.examine_machines()

    def examine(self, pod: Pod, *, at_once: bool = False) -> None:
        """Ask the API server why a pod ends whose end this session has not requested.

        A disruption is stored in the pod, which :meth:`pop_disrupted` then returns. Raises ApiError.

        Args:
            at_once: True to ask even if the last question is recent.
        """
        if not pod.is_unexplained():
            return
        with pod.examining:
            was_asked_lately = time.monotonic() < pod.examined_s + _EXAMINE_AGAIN_S
            if not pod.is_unexplained() or (was_asked_lately and not at_once):
                return
            pod_object = next(self._api.find("Pod", f"{manifests.PLACE}={pod.place}"), None)
            name = pod.place if pod_object is None else pod_object["metadata"]["name"]
            disruption = disruption_of(pod_object, self._events_about(name))
            if not pod.is_unexplained():  # this session has requested its end meanwhile
                return
            has_no_reason = (
                disruption is None and pod_object is not None and not has_ended(pod_object)
            )
            pod.examined_s = time.monotonic() if has_no_reason else math.inf
            if not has_no_reason:
                self._unproven.pop(pod, None)
            elif not pod.is_machine_examined:
                pod.is_machine_examined = True
                self._unproven[pod] = _MachineWatch(time.monotonic() + pod_placement.AVOID_S)
            if disruption is not None:
                pod.disruption = disruption
                self._disrupted.append(pod)

    def has_unproven(self) -> bool:
        """Return whether a pod's end is unexplained, and may be the loss of its machine."""
        return bool(self._unproven)

    def examine_machines(self) -> None:
        """Ask the API server whether machines of pods with an unexplained end are lost.

        The API server notices a loss some 50 s after the pods have fallen silent, when they are
        deleted already. It is not asked about a machine that is heard after that, nor if this
        process may not read nodes.
        """
        for pod, watch in list(self._unproven.items()):
            with pod.examining:
                if pod in self._unproven and not self._examine_machine(pod, watch):
                    return

    def _examine_machine(self, pod: Pod, watch: _MachineWatch) -> bool:
        """Ask about the machine of a pod, if it is time.

        Return whether the API server has answered.
        """
        now_s, answers = time.monotonic(), True
        if pod.machine and now_s <= watch.until_s:
            if now_s < watch.asked_s + _EXAMINE_AGAIN_S:
                return True
            watch.asked_s = now_s
            try:
                node = self._find_node(pod.machine)
            except ApiError as error:
                answers = not error.is_silence
                if not error.is_refusal:
                    return answers
            else:
                pod.disruption = loss_of_machine(pod.machine, node)
                if pod.disruption is not None:
                    pod.examined_s = math.inf
                    self._disrupted.append(pod)
                elif not watch.has_been_heard(self._last_heard(pod.machine)):
                    return True
        self._unproven.pop(pod, None)
        return answers

    def _find_node(self, machine: str) -> dict[str, Any] | None:
        """Return the object of a node of the cluster, or None if there is none. Raises ApiError."""
        try:
            return self._api.get("Node", machine)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return None

    def _last_heard(self, machine: str) -> str:
        """Return the time of the last sign of a machine, or "" if it is unknown."""
        try:
            return self._api.last_heard(machine)
        except ApiError:  # such as without the right to read leases
            return ""

    def _events_about(self, pod: str) -> list[dict[str, Any]]:
        """Return the events about a pod, or none if they cannot be read."""
        try:
            return self._api.events_about(pod)
        except ApiError:  # such as without the right to read events
            return []

    def pop_disrupted(self) -> list[Pod]:
        """Return the pods whose end by something else was found since the last call."""
        disrupted, self._disrupted = self._disrupted, []
        return disrupted

    def plan_loss(self, machine: str) -> None:
        """Note that ends of pods on ``machine`` are planned from now on, and need no reason."""
        for pod in self.on(machine):
            pod.ends_by_plan = True
        for pod in list(self._unproven):
            if pod.machine == machine:
                self._unproven.pop(pod, None)

    def forget_disrupted(self) -> None:
        """Forget the ends of pods that were noticed before a run."""
        self._disrupted.clear()
        self._unproven.clear()

    def await_tidy(self, limit_s: float) -> None:
        """Wait until forgotten pods are deleted and examined, for at most ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            self._tidying.submit(time.monotonic).result(limit_s)

    def create_preemptor(self, pod: Pod, priority_class: str) -> tuple[str, str]:
        """Create a pod that makes the scheduler preempt another one, and return its name and UID.

        It has a higher priority, and can run only on the machine of the other pod, but not beside
        that. So the scheduler preempts no other pod. The end of the other pod is planned from then
        on, even if the request fails.

        Raises:
            HarnessError: if the cluster would not preempt exactly that pod; no pod is created then.
            ApiError: if the API server refuses a request.
        """
        name = f"{self._session}-{PREEMPTOR}-{secrets.token_hex(3)}"
        manifest = manifests.preemptor(
            self._manifest(PREEMPTOR, name), pod.place, pod.machine, priority_class
        )
        if reason := why_not_preempting(
            self._api.create(manifest, dry_run=True), self._api.get("Pod", pod.place)
        ):
            raise HarnessError(f"the pod of {pod.station} is not preempted: {reason}")
        pod.end_requested = pod.ends_by_plan = (
            True  # it may still be preempted later: no other run uses it
        )
        self._may_have_unknown_pods = True
        try:
            return name, str(self._api.create(manifest)["metadata"]["uid"])
        except ApiError:
            self.delete_preemptor(name)  # it may exist all the same
            raise

    def was_preempted(self, pod: Pod, preemptor_uid: str) -> bool:
        """Return whether the scheduler reports that it preempted a pod for the one of this UID.

        The cluster keeps the report for an hour. False is returned if the server does not answer.
        """
        try:
            events = self._api.events_about(pod.place, "Preempted")
            return any(preemptor_uid in event.get("message", "") for event in events)
        except ApiError:
            return False

    def delete_preemptor(self, name: str) -> bool:
        """Delete a preemptor, and return whether the server has accepted that.

        A preemptor that is left is deleted before the next run.
        """
        try:
            self._api.delete("Pod", name, grace_s=0)
        except ApiError:
            return False
        return True

    def block_pods(self, how: How) -> Blocker:
        """Block pods that are created from now on, and return the blocker.

        It is in force until it is lifted or replaced by another one, or until the run is over. The
        coordinator's pod is never blocked.
        """
        if self._blocker is not None:
            self._blocker.lift()
        self._blocker = Blocker(how)
        return self._blocker

    def kill(self, pod: Pod, is_run_over: Callable[[], bool] = lambda: False) -> None:
        """Delete a pod with no grace, and wait until none of its processes runs or the run is over.

        Raises:
            HarnessError: if the API server refuses that or does not answer, or the pod does not end
                in 30 s.
        """
        self.delete(pod, 0)
        until_s = time.monotonic() + _END_S
        while not self.is_over(pod) and not is_run_over():
            if time.monotonic() > until_s:
                raise HarnessError(
                    f"the pod of {pod.station} was deleted, but has not ended after {_END_S:g} s"
                )
            time.sleep(_END_LOOK_S)

    def is_over(self, pod: Pod) -> bool:
        """Return whether no process of a pod runs.

        That is so if the stream of its first process has ended, and with that process all others by
        the kernel's rule. The API server must also have no such pod, or say that it has ended. The
        server is asked at most ten times a second; the last answer is returned in between.
        """
        if pod.lives() or time.monotonic() < pod.asked_s + ASK_AGAIN_S:
            return pod.was_over
        pod.asked_s = time.monotonic()
        try:
            if (
                pod.fell_silent and not pod.end_requested
            ):  # its deletion failed, so it is tried again
                self.delete(pod, 0)
            pods = self._api.find("Pod", f"{manifests.PLACE}={pod.place}")
            ended = all(map(has_ended, pods))
        except ApiError:  # without an answer there is no proof
            ended = False
        if ended:
            pod.was_over = True
            pod.kernel.end()
        return ended

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the links to all pods, which ends their processes. The session deletes the pods."""
        self._tidying.shutdown(cancel_futures=True)
        for pod in self.all():
            pod.disconnect()


class _MachineWatch:
    """The state of a search for the loss of a machine.

    Attributes:
        until_s: monotonic time of the end of the search.
        asked_s: monotonic time of the last question to the API server.
    """

    def __init__(self, until_s: float) -> None:
        self.until_s, self.asked_s = until_s, -math.inf
        self._last_heard = ""

    def has_been_heard(self, last_heard: str) -> bool:
        """Return whether the machine's kubelet has renewed its lease since the first look.

        Args:
            last_heard: time of the last renewal; "" if it is unknown.
        """
        before, self._last_heard = self._last_heard, last_heard or self._last_heard
        return bool(before and last_heard) and before != last_heard


def _report_to_blockers(absent: Mapping[str, Pod], reasons: Iterable[Pending]) -> bool:
    """Report the reasons of absent pods to their blockers, and return whether a pod is blocked.

    Raises:
        HarnessError: if a blocker is lifted: these pods will never run, and others would.
    """
    blocked = {station: pod for station, pod in absent.items() if pod.blocker is not None}
    for station, pod in blocked.items():
        assert pod.blocker is not None
        if pod.blocker.is_lifted:
            raise HarnessError("the pod's blocker was lifted, and another pod is created instead")
        for reason in reasons:
            if reason.station == station:
                pod.blocker.note_reason(pod.place, reason)
    return bool(blocked)
