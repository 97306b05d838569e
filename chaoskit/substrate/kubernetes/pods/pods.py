"""The pods of a session, by the station that each is for: how they are made and waited for, replaced and ended.

What waits for pods blocks its thread. It touches no stream that an event loop hears: it may run in a thread of its own
while the loop goes on (:meth:`SessionPods.replace`).
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
from chaoskit.substrate.kubernetes.api.requests import ApiError, EvictionRefused, KubernetesApi
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests, placement
from chaoskit.substrate.kubernetes.pods.actions import ANSWER_S
from chaoskit.substrate.kubernetes.pods.diagnosis import PodDiagnosis
from chaoskit.substrate.kubernetes.pods.disruption import Disruption, disruption_of, loss_of_machine
from chaoskit.substrate.kubernetes.pods.pod_blocker import Hindrance, How
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

_LOOK_S = 0.5  # between two looks at pods that do not come
_WARM_S = 120.0
_END_S = 30.0
_END_LOOK_S = 0.02
ASK_AGAIN_S = 0.1  # the API server, of one pod
_EXAMINE_AGAIN_S = 1.0  # a pod that has ended, and of which the API server does not say why yet
#: The station of a pod that is made to take another one's place on its machine.
PREEMPTOR = "preemptor"


class Pod:
    """One pod, and the streams that come from it.

    Attributes:
        place: what its supervisor says that it is, and its label; never used again. It is the name of its object, too,
            but of a pod that a Job has made.
        link, helper: the streams to its supervisor, and to what may change its network, if it has such a helper.
        address: under which its processes are reached. machine: on which it is.
        is_made: whether this session has made its object itself.
        goes: whether this session has asked for its end.
        hindrance: what keeps it from running, if anything does.
        is_displaced: whether it would be elsewhere if no machine had been lost.
        fell_silent: whether it counts as lost because its supervisor did not answer.
        ends_by_plan: whether this session ends it, or has its machine broken.
        first_sign_ns: when its end was noticed first, on the monotonic clock; 0 if it was not.
        disruption: why it went, where this session has not asked for that.
        asked_s: when the API server was last asked whether it is over, on the monotonic clock. was_over: its answer.
    """

    def __init__(self, station: str, place: str, ask_over: Callable[[Pod], bool]) -> None:
        self.station = station
        self.place = place
        self.address = ""
        self.machine = ""
        self.kernel = KernelAway(lambda: ask_over(self))
        self.link: SupervisorLink | None = None
        self.helper: SupervisorLink | None = None
        self.hindrance: Hindrance | None = None
        self.is_made = self.goes = False
        self.is_displaced = False
        self.fell_silent = False
        self.ends_by_plan = False
        self.first_sign_ns = 0
        self.disruption: Disruption | None = None
        self.examined_s = -math.inf  # math.inf: it is known why it went
        self.is_machine_examined = False  # or is being examined: once is enough
        self.examining = threading.Lock()
        self.was_over = False
        self.asked_s = -math.inf

    def come(self, place: str, arrival: Arrival) -> None:
        """Its supervisor has dialed, or its helper, which has a place of its own."""
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

    def become(self, station: str) -> None:
        """Take the place of the pod of another station."""
        self.station = station
        if self.link is not None:
            self.link.name = f"the supervisor of {station}"

    @property
    def stands_by(self) -> bool:
        """Whether it is for no node yet."""
        return self.station.startswith(manifests.STANDBY)

    def lives(self) -> bool:
        """Whether its supervisor still listens."""
        return self.link is not None and self.link.is_open()

    def leaves(self) -> bool:
        """Whether its processes were told to end, or soon will be."""
        return self.goes or (self.link is not None and self.link.leaves)

    @property
    def role(self) -> str:
        """The role of its processes in a run: ``node``, ``coordinator`` or ``standby``."""
        return (
            COORDINATOR if self.station == COORDINATOR else "standby" if self.stands_by else "node"
        )

    def note_end(self) -> None:
        """Note the time if its processes end or have ended. It hears its supervisor: not for another thread."""
        if (
            not self.first_sign_ns
            and self.link is not None
            and (self.link.leaves or not self.link.is_open())
        ):
            self.first_sign_ns = time.monotonic_ns()

    def is_unexplained(self) -> bool:
        """Return whether it ends or has ended, this session has not asked for that, and the reason is not known yet."""
        is_ours = self.ends_by_plan or self.goes
        return bool(self.first_sign_ns) and not is_ours and self.examined_s < math.inf

    def hang_up(self) -> None:
        """End the streams to its supervisor and its helper, and with them all that runs there."""
        for link in (self.link, self.helper):
            if link is not None:
                link.close()


class SessionPods:
    """Makes the pods of a session, and knows the one that each station has.

    A pod is *lost* when its stream has ended, or its supervisor does not answer. A lost pod is *replaced* by one that
    stands by, else by a new one, never on a machine that has fallen silent.

    Args:
        session: its name. reception: where supervisors come to. runner: the address that they dial.
        manifest: the object of a pod, before it is said on which machines it may be.
        tell: told in a line why pods are waited for.
        background: makes requests that nothing waits for: labels and annotations. Deletions do not go through it.
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
        self._lost, self._returning = placement.LostMachines(), set[str]()
        self._hindrance: Hindrance | None = None
        self._taken: list[Pod] = []  # by something else, and not written down yet
        self._unproven: dict[
            Pod, _MachineWatch
        ] = {}  # pods whose end only the loss of their machine may explain
        self._may_have_others = (
            True  # pods on the cluster that are not known here: of a driver before this one
        )
        self._tidying = ThreadPoolExecutor(
            1, thread_name_prefix="ck-tidy"
        )  # deletions, and nothing else

    # -- which there are ------------------------------------------------------------------------------------------

    def get(self, station: str) -> Pod | None:
        """The pod of a station; None while it has none."""
        return self._by_station.get(station)

    def all(self) -> Sequence[Pod]:
        """The pods of all stations."""
        return tuple(self._by_station.values())

    def running(self, node: str) -> Pod:
        """The pod of a node, to be broken. Raises ProcessLookupError if it is gone, or goes already: what ends it then
        would be another's doing.
        """
        pod = self.get(node)
        if pod is None or not pod.lives() or pod.leaves():
            raise ProcessLookupError(f"the pod of {node} is gone, or goes already")
        return pod

    def on(self, machine: str) -> Sequence[Pod]:
        """The pods on a machine."""
        return tuple(pod for pod in self.all() if pod.machine == machine)

    def add(self, pod: Pod) -> None:
        """Know a pod as that of its station."""
        self._by_station[pod.station] = pod

    def is_lost(self, station: str) -> bool:
        """Whether a station has no pod that lives, or one on a machine that has fallen silent."""
        pod = self.get(station)
        return pod is None or not pod.lives() or self._is_avoided(pod.machine)

    def _is_avoided(self, machine: str) -> bool:
        return machine in self._lost.avoided(time.monotonic())

    # -- before a run ---------------------------------------------------------------------------------------------

    def expect_back(self, machine: str) -> None:
        """A machine that was lost is there again by the next run: what puts it back waits for that."""
        self._returning.add(machine)

    def settle_in(self) -> None:
        """Before a run, forget and delete every pod that does not serve it: those that are lost or told to end, those
        that went elsewhere for want of a machine that is back, those that came too late, and those of a driver that
        was killed.

        Raises:
            ApiError: if there are any, and the server does not answer.
        """
        for machine in self._returning:
            self._lost.note_back(machine)
        self._returning.clear()
        self._hindrance = None
        whole = not self._lost.avoided(time.monotonic())
        for pod in self.all():
            pod.ends_by_plan = (
                pod.goes or pod.fell_silent
            )  # what was to end it was of the run before
            if not self.serves(pod) or (pod.is_displaced and whole):
                self._forget(pod)
                self._may_have_others = pod.ends_by_plan = True
                self._api.delete("Pod", pod.place, grace_s=0)
        if self._may_have_others:
            self._may_have_others = False
            try:
                self._delete_others()
            except BaseException:
                self._may_have_others = True
                raise

    def _delete_others(self) -> None:
        known = {pod.place for pod in self.all()}
        made = (
            f"{manifests.selector(self._session)},{manifests.STATION}!={manifests.DRIVER_STATION}"
        )
        for one in self._api.find("Pod", made):
            if one["metadata"]["labels"].get(manifests.PLACE) not in known:
                self._api.delete("Pod", one["metadata"]["name"], grace_s=0)

    def serves(self, pod: Pod) -> bool:
        """Whether another run can have it: it lives, with its helper where it is to have one, and goes nowhere."""
        is_starting = pod.link is None or not pod.link.await_ready(0.0)
        has_helper = pod.helper is not None and pod.helper.is_open()
        is_whole = has_helper or is_starting or self._options.network_faults != "allow"
        return pod.lives() and is_whole and not pod.leaves()

    def drop_standbys(self, beyond: Collection[str]) -> None:
        """Forget those that stand by for no run: a run that counts on having none would take one."""
        for pod in self.all():
            if pod.stands_by and pod.station not in beyond:
                self._forget(pod)
                self._tidying.submit(self._drop, pod)

    def find_silent(self) -> None:
        """Have each supervisor give a sign of life that has started. Where none does, this end has no network."""
        there = [
            (pod, pod.link)
            for pod in self.all()
            if pod.link is not None and pod.link.await_ready(0.0)
        ]
        asked = [(pod, link, link.ask_alive()) for pod, link in there if link.is_open()]
        until_s = time.monotonic() + ANSWER_S
        silent = [
            pod
            for pod, link, before in asked
            if not link.await_sign(before, until_s - time.monotonic())
        ]
        for pod in silent:
            if len(silent) < len(asked):
                pod.ends_by_plan = True  # no run is judged by it
                self.note_silent(pod)
            else:
                pod.hang_up()

    def stand_ready(self, stations: Iterable[str]) -> None:
        """Have a pod for each of these, with a supervisor that can start programs.

        Raises:
            BadInput: if no pod can be made so. HarnessError: if one does not run in time, with the reason.
        """
        made = [self.new_pod(station) for station in stations if station not in self._by_station]
        try:
            for pod in made:
                self._create(pod)
                self.add(pod)
            self.await_arrivals(made)
            for pod in self.all():
                self._await_ready(pod)
        except BaseException:
            for pod in made:
                if not pod.lives():
                    self._forget(pod)  # the next run makes another one
            self._may_have_others = True
            raise

    # -- how one is made ------------------------------------------------------------------------------------------

    def new_pod(self, station: str) -> Pod:
        """A pod that is to be made: its supervisor is let in."""
        pod = Pod(station, f"{self._session}-{station}-{secrets.token_hex(3)}", self.is_over)
        self.expect(pod)
        return pod

    def expect(self, pod: Pod) -> None:
        """Let the supervisor of a pod in, and its helper."""
        for place in self._places(pod):
            self._reception.expect(place)

    def _places(self, pod: Pod) -> list[str]:
        has_helper = self._options.network_faults == "allow"
        return [pod.place, *([manifests.helper_place(pod.place)] if has_helper else [])]

    def _create(self, pod: Pod) -> None:
        made = self._manifest(pod.station, pod.place)
        avoided = self._lost.avoided(time.monotonic())
        pod.is_displaced = bool(avoided)
        if avoided:
            placement.keep_off(made, avoided)
        elif pod.station != COORDINATOR and not pod.stands_by:
            placement.only_on(made, self._options.breakable)
        is_hindered = self._hindrance is not None and not self._hindrance.is_lifted
        if (
            self._hindrance is not None and is_hindered and pod.station != COORDINATOR
        ):  # the run itself goes on
            pod.hindrance = self._hindrance
            pod.hindrance.spoil(made)
        try:
            self._api.create(made)
        except (
            ApiError
        ) as error:  # without the name, which no other attempt has: the same reason is told once
            raise ApiError(
                str(error).replace(pod.place, pod.station), error.status, error.causes
            ) from None
        pod.is_made = True

    def await_arrivals(
        self, pods: Sequence[Pod], is_run_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for supervisors, and say why they do not come. Raises BadInput, HarnessError."""
        missing = {place: pod for pod in pods for place in self._places(pod)}
        until_s, shown = time.monotonic() + self._options.startup_s, ""
        while missing:
            if (arrived := self._reception.await_any(missing, _LOOK_S)) is not None:
                pod = missing.pop(arrived[0])
                pod.come(*arrived)
                self._lost.note_back(pod.machine)
                continue
            if is_run_over():
                raise HarnessError("the run is over")
            absent = {pod.station: pod for pod in missing.values()}
            told = self.diagnosis.pending(absent, missing, self._made(absent))
            hindered = _hear_hindrances(absent, told)
            if told and not same_but_ports(text := in_words(told), shown):
                self._tell(shown := text)
            # an image that a fault has spoilt is waited for: the fault may be lifted
            is_final = any(
                one.is_final and not (hindered and one.reason in PULL_REASONS) for one in told
            )
            if time.monotonic() > until_s or is_final:
                if hindered:  # nothing is wrong with what the user gave
                    raise HarnessError(f"pods do not run: {shown}")
                otherwise = f"no supervisor came to {self._runner}: can pods reach it?"
                self.diagnosis.raise_not_running(told, list(absent), otherwise)

    @staticmethod
    def _made(absent: Mapping[str, Pod]) -> dict[str, str]:
        return {pod.place: station for station, pod in absent.items() if pod.is_made}

    def _await_ready(self, pod: Pod, is_run_over: Callable[[], bool] = lambda: False) -> None:
        until_s = time.monotonic() + _WARM_S
        while pod.link is None or not pod.link.await_ready(_LOOK_S):
            if is_run_over():
                raise HarnessError("the run is over")
            if not pod.lives() or time.monotonic() > until_s:
                self.require_there([pod])
                log = self.diagnosis.log(pod.station)
                raise HarnessError(f"the supervisor of {pod.station} did not start:\n{log}")

    def require_there(self, pods: Iterable[Pod]) -> None:
        """Raises HarnessError if something else took one of these pods, with the proof."""
        for pod in pods:
            pod.note_end()
            with contextlib.suppress(ApiError):
                self.examine(pod)
            if pod.disruption is not None:
                raise HarnessError(
                    f"before the first step the pod of {pod.station} was {pod.disruption}"
                )

    # -- while a run goes on --------------------------------------------------------------------------------------

    def replace(
        self,
        station: str,
        is_run_over: Callable[[], bool] = lambda: False,
        prepare: Callable[[SupervisorLink], None] = lambda link: None,
    ) -> None:
        """Have another pod for a station whose own is lost: one that stands by, else a new one. The stream of the lost
        one must have ended. Takes seconds where a pod is made.

        Args:
            is_run_over: whether it is of no use any more. prepare: does something there before it is the station's.

        Raises:
            ApiError, BadInput, HarnessError: if no pod can be made now, or it does not run in time.
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
                standby.become(station)
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
            self._may_have_others = True  # the server may make it yet
            self._tidying.submit(self._drop, pod)
            raise
        self.add(pod)

    def _take_standby(self) -> Pod | None:
        """A pod that stands by, which is no other's then; None if there is none that lives."""
        for pod in self.all():
            if pod.stands_by and self._by_station.pop(pod.station, None) is pod:
                if pod.lives() and not pod.leaves() and not self._is_avoided(pod.machine):
                    return pod
                self._forget(pod)
                self._tidying.submit(self._drop, pod)
        return None

    def note_silent(self, pod: Pod, since_ns: int = 0) -> None:
        """The supervisor of a pod does not answer: the pod is lost, and none is made on its machine for a while.

        ``since_ns``: when that was asked first, on the monotonic clock; 0 for now.
        """
        pod.first_sign_ns = pod.first_sign_ns or since_ns or time.monotonic_ns()
        self._lost.note_lost(pod.machine, time.monotonic())
        pod.fell_silent = True
        pod.hang_up()
        self._tidying.submit(self._drop, pod)

    def _forget(self, pod: Pod) -> None:
        if self.get(pod.station) is pod:
            del self._by_station[pod.station]
        for place in self._places(pod):
            self._reception.give_up(place)
        pod.hang_up()

    def _drop(self, pod: Pod) -> None:
        """Delete a pod; what is left of it goes before the next run (:meth:`settle_in`)."""
        try:
            self.delete(pod, 0)
        except ApiError:
            self._may_have_others = True

    def label(
        self,
        station: str,
        labels: Mapping[str, str | None],
        annotations: Mapping[str, str | None] | None = None,
    ) -> None:
        """Show a pod's part in a run by labels and annotations; None removes one. Nothing waits for the request."""
        if (pod := self.get(station)) is not None:
            change = {"metadata": {"labels": labels, "annotations": annotations or {}}}
            key = (pod.place, frozenset(labels))
            self._background.submit(partial(self._api.patch, "Pod", pod.place, change), key)

    # -- what faults do to them -----------------------------------------------------------------------------------

    def delete(self, pod: Pod, grace_s: int) -> None:
        """Delete a pod, and give its processes this time to end. Raises ApiError."""
        self.examine(
            pod, at_once=True
        )  # of one that has ended by itself nothing tells why afterwards
        with self._ending(pod):
            self._api.delete("Pod", pod.place, grace_s=grace_s)

    def evict(self, pod: Pod, grace_s: int) -> None:
        """Have a pod evicted. Raises EvictionRefused where a PodDisruptionBudget forbids it, and ApiError."""
        with self._ending(pod):
            self._api.evict(pod.place, grace_s)

    @contextlib.contextmanager
    def _ending(self, pod: Pod) -> Iterator[None]:
        """Have a pod go: its supervisor may tell of its end before the API server has answered."""
        before, pod.ends_by_plan = pod.ends_by_plan, True
        try:
            yield
        except ApiError as error:
            if error.is_refusal or isinstance(
                error, EvictionRefused
            ):  # else the server may have done it
                pod.ends_by_plan = before
            raise
        pod.goes = True

    # -- what others do to them -----------------------------------------------------------------------------------

    def examine_all(self, stations: Iterable[str]) -> None:
        """Examine the pods of stations, and machines. Stop at the first that the API server does not answer for."""
        for pod in filter(None, map(self.get, stations)):
            try:
                self.examine(pod)
            except ApiError as error:
                if error.is_silence:
                    return
        self.examine_machines()

    def examine(self, pod: Pod, *, at_once: bool = False) -> None:
        """Ask the API server why a pod goes that this session has not told to go. Raises ApiError.

        ``at_once``: also if it has just been asked, and did not know.
        """
        if not pod.is_unexplained():
            return
        with pod.examining:
            asked_lately = time.monotonic() < pod.examined_s + _EXAMINE_AGAIN_S
            if not pod.is_unexplained() or (asked_lately and not at_once):
                return
            found = next(self._api.find("Pod", f"{manifests.PLACE}={pod.place}"), None)
            name = pod.place if found is None else found["metadata"]["name"]
            disruption = disruption_of(found, self._events_about(name))
            if not pod.is_unexplained():  # this session has told it to go meanwhile
                return
            has_no_reason = disruption is None and found is not None and not has_ended(found)
            pod.examined_s = time.monotonic() if has_no_reason else math.inf
            if not has_no_reason:
                self._unproven.pop(pod, None)
            elif not pod.is_machine_examined:
                pod.is_machine_examined = True
                self._unproven[pod] = _MachineWatch(time.monotonic() + placement.AVOID_S)
            if disruption is not None:
                pod.disruption = disruption
                self._taken.append(pod)

    def has_unproven(self) -> bool:
        """Return whether the end of a pod is not explained, and may be the loss of its machine."""
        return bool(self._unproven)

    def examine_machines(self) -> None:
        """Ask the API server whether machines are lost whose pods have ended without a reason.

        It knows that some 50 s after the pods have fallen silent, when they are deleted already. It is not asked about
        a machine that is heard after that, nor where this process may not read nodes.
        """
        for pod, watch in list(self._unproven.items()):
            with pod.examining:
                if pod in self._unproven and not self._examine_machine(pod, watch):
                    return

    def _examine_machine(self, pod: Pod, watch: _MachineWatch) -> bool:
        """Ask about the machine of a pod, if it is time. Return whether the API server has answered."""
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
                    self._taken.append(pod)
                elif not watch.has_been_heard(self._last_heard(pod.machine)):
                    return True
        self._unproven.pop(pod, None)
        return answers

    def _find_node(self, machine: str) -> dict[str, Any] | None:
        """Return a node of the cluster; None if there is none. Raises ApiError."""
        try:
            return self._api.get("Node", machine)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return None

    def _last_heard(self, machine: str) -> str:
        try:
            return self._api.last_heard(machine)
        except ApiError:  # such as for want of the right to read leases
            return ""

    def _events_about(self, pod: str) -> list[dict[str, Any]]:
        try:
            return self._api.events_about(pod)
        except ApiError:  # such as for want of the right to read events
            return []

    def take_taken(self) -> list[Pod]:
        """Return the pods that something else took since this was asked last."""
        taken, self._taken = self._taken, []
        return taken

    def plan_loss(self, machine: str) -> None:
        """Note that what ends pods of ``machine`` from now on is the doing of this run."""
        for pod in self.on(machine):
            pod.ends_by_plan = True
        for pod in list(self._unproven):
            if pod.machine == machine:
                self._unproven.pop(pod, None)

    def forget_taken(self) -> None:
        """Forget the ends of pods that were before a run."""
        self._taken.clear()
        self._unproven.clear()

    def await_tidy(self, limit_s: float) -> None:
        """Wait until pods that were forgotten are deleted, and their ends examined, but no longer than this."""
        with contextlib.suppress(TimeoutError):
            self._tidying.submit(time.monotonic).result(limit_s)

    def create_preemptor(self, pod: Pod, priority_class: str) -> tuple[str, str]:
        """Make a pod of a higher priority that can only run on the machine of another one, and not beside that one. So
        the scheduler preempts that one, and no other. Gives its name and its UID.

        Raises:
            HarnessError: if that would be no such pod on this cluster; nothing is made then. ApiError.
        """
        name = f"{self._session}-{PREEMPTOR}-{secrets.token_hex(3)}"
        made = manifests.preemptor(
            self._manifest(PREEMPTOR, name), pod.place, pod.machine, priority_class
        )
        if reason := why_not_preempting(
            self._api.create(made, dry_run=True), self._api.get("Pod", pod.place)
        ):
            raise HarnessError(f"no pod is made that preempts that of {pod.station}: {reason}")
        pod.goes = pod.ends_by_plan = True  # it may be preempted later, too: no other run has it
        self._may_have_others = True
        try:
            return name, str(self._api.create(made)["metadata"]["uid"])
        except ApiError:
            self.delete_preemptor(name)  # it may be there all the same
            raise

    def was_preempted(self, pod: Pod, preemptor_uid: str) -> bool:
        """Whether the scheduler says that it has preempted a pod for the one of this UID. It says so for an hour."""
        try:
            events = self._api.events_about(pod.place, "Preempted")
            return any(preemptor_uid in one.get("message", "") for one in events)
        except ApiError:
            return False

    def delete_preemptor(self, name: str) -> bool:
        """Delete it, and say whether that was done. What is left goes before the next run."""
        try:
            self._api.delete("Pod", name, grace_s=0)
        except ApiError:
            return False
        return True

    def hinder(self, how: How) -> Hindrance:
        """Keep pods from running that are made from now on, until that is lifted, or replaced by another hindrance."""
        if self._hindrance is not None:
            self._hindrance.lift()
        self._hindrance = Hindrance(how)
        return self._hindrance

    def kill(self, pod: Pod, is_run_over: Callable[[], bool] = lambda: False) -> None:
        """Delete a pod with no grace, and wait until nothing of it runs, or that is of no use any more.

        Raises:
            HarnessError: if the API server refuses that, or the pod does not end.
        """
        self.delete(pod, 0)
        until_s = time.monotonic() + _END_S
        while not self.is_over(pod) and not is_run_over():
            if time.monotonic() > until_s:
                raise HarnessError(
                    f"the pod of {pod.station} was deleted, and is not gone after {_END_S:g} s"
                )
            time.sleep(_END_LOOK_S)

    def is_over(self, pod: Pod) -> bool:
        """Whether nothing of a pod runs: the stream of its first process has ended, and with that process all others
        by the kernel's rule; and the API server has no such pod any more, or says that it has ended.
        """
        if pod.lives() or time.monotonic() < pod.asked_s + ASK_AGAIN_S:
            return pod.was_over
        pod.asked_s = time.monotonic()
        try:
            if (
                pod.fell_silent and not pod.goes
            ):  # its deletion failed, and nothing else ends it there
                self.delete(pod, 0)
            found = self._api.find("Pod", f"{manifests.PLACE}={pod.place}")
            ended = all(map(has_ended, found))
        except ApiError:  # no answer is no proof
            ended = False
        if ended:
            pod.was_over = True
            pod.kernel.end()
        return ended

    # -- their end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything in all pods; what makes the session's end deletes them."""
        self._tidying.shutdown(cancel_futures=True)
        for pod in self.all():
            pod.hang_up()


class _MachineWatch:
    """The state of a search for the loss of a machine.

    Attributes:
        until_s: the end of the search, on the monotonic clock. asked_s: when the API server was last asked.
    """

    def __init__(self, until_s: float) -> None:
        self.until_s, self.asked_s = until_s, -math.inf
        self._last_heard = ""

    def has_been_heard(self, last_heard: str) -> bool:
        """Return whether the machine's kubelet has renewed its lease since the first look; "" where that is unknown."""
        before, self._last_heard = self._last_heard, last_heard or self._last_heard
        return bool(before and last_heard) and before != last_heard


def _hear_hindrances(absent: Mapping[str, Pod], told: Iterable[Pending]) -> bool:
    """Let what keeps pods from running hear why they do not. Whether anything does.

    Raises:
        HarnessError: if it does so no more: these pods will never run, and others would.
    """
    hindered = {station: pod for station, pod in absent.items() if pod.hindrance is not None}
    for station, pod in hindered.items():
        assert pod.hindrance is not None
        if pod.hindrance.is_lifted:
            raise HarnessError("what kept the pod from running is over, and another one is made")
        for one in told:
            if one.station == station:
                pod.hindrance.hear(pod.place, one)
    return bool(hindered)
