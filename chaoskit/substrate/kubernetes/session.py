"""One session on a cluster: the pods of its runs, and what goes with them.

All objects belong to one Job. In its pod is the driver of the runs (:mod:`.driver_pod`), and without one the
coordinator. Supervisors end when their stream to the runner does, so the pod of that Job ends with the runner,
Kubernetes removes the Job a little later, and its garbage collector removes all that the Job owns. The runner, its
guard and ``chaoskit cleanup`` only delete the Job sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from chaoskit.errors import BadInput, HarnessError
from chaoskit.osprocess import user_at_host
from chaoskit.substrate.kubernetes import manifests, placement, template
from chaoskit.substrate.kubernetes.api import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.diagnosis import PodDiagnosis
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.network import COORDINATOR
from chaoskit.substrate.supervisor.away import KernelAway
from chaoskit.substrate.supervisor.link import SupervisorLink
from chaoskit.substrate.supervisor.reception import Arrival, Reception
from chaoskit.substrate.undo import CommandEntry, Undo, UndoLog

_LOOK_S = 0.5  # between two looks at pods that do not come
_WARM_S = 120.0
START_MORE_S = 60  # beyond what pods have to start
DEADLINE_S = 24 * 3600  # of a session whose pods run
_END_S = 30.0
_END_LOOK_S = 0.02
_ASK_AGAIN_S = 0.1
#: Within which a supervisor answers that has nothing else to do.
ANSWER_S = 1.0
_TURN_S = 0.05  # between two looks of the event loop at a pod that is to come


class Pod:
    """One pod, and the stream to its supervisor once that has come.

    Attributes:
        place: what its supervisor says that it is; never used again.
        address: under which its processes are reached. machine: on which it is.
        goes: whether this session has asked for its end.
        is_displaced: whether it would be elsewhere if no machine had been lost.
        fell_silent: whether it was given up because its supervisor did not answer.
        asked_s: when the API server was last asked whether it is over, on the monotonic clock. is_over: its answer.
    """

    def __init__(self, station: str, place: str, is_over: Callable[[Pod], bool]) -> None:
        self.station, self.place, self.address, self.machine = station, place, "", ""
        self.kernel = KernelAway(lambda: is_over(self))
        self.link: SupervisorLink | None = None
        self.asked_s, self.is_over = -math.inf, False
        self.goes = self.is_displaced = self.fell_silent = False

    def come(self, arrival: Arrival) -> None:
        """Its supervisor has dialed."""
        self.address, self.machine = arrival.address, arrival.machine
        self.link = SupervisorLink(arrival.connection, f"the supervisor of {self.station}", self.kernel)
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


class Session:
    """Makes pods, and knows them by the station that each is for.

    Args:
        undo: what must be put back if this process is killed.
        tell: told in a line why pods are waited for.

    Raises:
        BadInput: if the cluster, the namespace or the template cannot be used; nothing is made then.
    """

    def __init__(self, options: KubernetesOptions, undo: UndoLog, tell: Callable[[str], None]) -> None:
        options.require()
        self._options, self._undo, self._tell = options, undo, tell
        self._given = template.read(options.template) if options.template else {}
        self.api = KubernetesApi(options.context, options.namespace)
        self._driven = options.driven
        if self._driven is None:
            require_allowed(self.api)
        self.name = new_name() if self._driven is None else self._driven.name
        self._diagnosis = PodDiagnosis(self.api, self.name, options)
        self._runner = options.address or _address_towards(self.api.server)
        token = secrets.token_hex(16) if self._driven is None else self._driven.read("token")
        # an address that was given may be one that is translated on its way here
        self._reception = Reception("" if options.address else self._runner, token)
        self._owner: dict[str, Any] = {}
        self._ends: Undo | None = None
        self.pods: dict[str, Pod] = {}
        self._lost, self._returning = placement.LostMachines(), set[str]()
        try:
            if self._driven is None:
                self._open(token)
            else:
                self._owner = manifests.owner(self._driven.name, self._driven.read("owner"))
                self._end_former_pods()
        except BaseException:
            self.close()
            raise

    # -- what it makes --------------------------------------------------------------------------------------------

    def _open(self, token: str) -> None:
        pod = Pod(COORDINATOR, f"{self.name}-{COORDINATOR}", self.is_pod_over)
        inside = self._manifest(pod)
        start_s = math.ceil(self._options.startup_s) + START_MORE_S
        made = manifests.job(self.name, inside, started_by=user_at_host(), deadline_s=start_s)
        for manifest in (inside, made):
            self._diagnosis.dry_run(manifest)
        self._ends = self._undo.plan(CommandEntry(shlex.join(end_command(self.name, self.api))))
        self._reception.expect(pod.place)
        self._owner = manifests.owner(self.name, self.api.create(made)["metadata"]["uid"])
        self.pods[COORDINATOR] = pod
        self.api.create(manifests.secret(self.name, token, self._owner))
        self.api.create(manifests.network_policy(self.name, self._runner, self._owner))
        self._await_arrivals([pod])
        self.api.patch("Job", self.name, {"spec": {"activeDeadlineSeconds": DEADLINE_S}})

    def _end_former_pods(self) -> None:
        """Delete what a driver has left that was killed, and its supervisor was not."""
        for one in self._made():
            self.api.delete("Pod", one["metadata"]["name"], grace_s=0)

    def _manifest(self, pod: Pod) -> manifests.Manifest:
        runner, owner = f"{self._runner}:{self._reception.address[1]}", self._owner or None
        made = manifests.pod(self.name, pod.station, pod.place, runner, self._options, self._given, owner)
        avoided = self._lost.avoided(time.monotonic())
        pod.is_displaced = bool(avoided)
        if avoided:
            placement.keep_off(made, avoided)
        elif pod.station != COORDINATOR and not pod.stands_by:
            placement.only_on(made, self._options.breakable)
        return made

    def stand_ready(self, stations: Iterable[str]) -> None:
        """Have a pod for each of these, with a supervisor that can start programs.

        Raises:
            BadInput: if no pod can be made so. HarnessError: if one does not run in time, with the reason.
        """
        for station in [station for station, pod in self.pods.items() if pod.link is None]:
            self.remove(station)  # it did not come when it was made
        for station in stations:
            if station not in self.pods:
                self._create(station)
        self._await_arrivals([pod for pod in self.pods.values() if pod.link is None])
        for pod in self.pods.values():
            if pod.link is None or not pod.link.await_ready(_WARM_S):
                raise HarnessError(
                    f"the supervisor of {pod.station} did not start:\n{self._diagnosis.log(pod.station)}"
                )

    def _create(self, station: str) -> None:
        pod = self._expected(station)
        self.api.create(self._manifest(pod))
        self.pods[station] = pod

    def _expected(self, station: str) -> Pod:
        """A pod that is to be made."""
        pod = Pod(station, f"{self.name}-{station}-{secrets.token_hex(3)}", self.is_pod_over)
        self._reception.expect(pod.place)
        return pod

    def _await_arrivals(self, absent: Sequence[Pod]) -> None:
        """Wait for supervisors, and say why they do not come."""
        missing = {pod.place: pod for pod in absent}
        until_s, shown = time.monotonic() + self._options.startup_s, ""
        while missing:
            if (arrived := self._reception.await_any(missing, _LOOK_S)) is not None:
                missing.pop(arrived[0]).come(arrived[1])
                continue
            told = self._diagnosis.pending([pod.station for pod in missing.values()], missing)
            if told and (text := "; ".join(map(str, told))) != shown:
                self._tell(shown := text)
            if time.monotonic() > until_s or any(one.is_final for one in told):
                absent_ones = [pod.station for pod in missing.values()]
                self._diagnosis.raise_not_running(
                    told, absent_ones, f"no supervisor came to {self._runner}: can pods reach it?"
                )

    def kill(self, station: str) -> None:
        """Delete the pod of a station with no grace, and wait until nothing of it runs.

        Raises:
            HarnessError: if the API server refuses that, or the pod does not end.
        """
        pod = self.pods[station]
        self.delete(pod, 0)
        until_s = time.monotonic() + _END_S
        while not self.is_pod_over(pod):
            if time.monotonic() > until_s:
                raise HarnessError(f"the pod of {station} was deleted, and is not gone after {_END_S:g} s")
            time.sleep(_END_LOOK_S)

    def delete(self, pod: Pod, grace_s: int) -> None:
        """Delete a pod, and give its processes this time to end. Raises ApiError."""
        self.api.delete("Pod", pod.place, grace_s=grace_s)
        pod.goes = True

    def evict(self, pod: Pod, grace_s: int) -> None:
        """Have a pod evicted. Raises EvictionRefused where a PodDisruptionBudget forbids it, and ApiError."""
        self.api.evict(pod.place, grace_s)
        pod.goes = True

    def is_pod_over(self, pod: Pod) -> bool:
        """Whether nothing of a pod runs: the stream of its first process has ended, and with that process all others
        by the kernel's rule; and the API server has no such pod any more, or says that it has ended.
        """
        if pod.lives() or time.monotonic() < pod.asked_s + _ASK_AGAIN_S:
            return pod.is_over
        pod.asked_s = time.monotonic()
        try:
            found = self.api.find("Pod", f"{manifests.PLACE}={pod.place}")
            ended = all(one.get("status", {}).get("phase") in ("Failed", "Succeeded") for one in found)
        except ApiError:  # no answer is no proof
            ended = False
        if ended:
            pod.is_over = True
            pod.kernel.end()
        return ended

    def remove(self, station: str) -> None:
        """Forget the pod of a station, which is lost, and delete it; another one can be made."""
        pod = self._forget(station)
        self.api.delete("Pod", pod.place, grace_s=0)

    def _forget(self, station: str) -> Pod:
        pod = self.pods.pop(station)
        self._reception.give_up(pod.place)
        if pod.link is not None:
            pod.link.close()
        return pod

    def replace(self, node: str) -> None:
        """Have another pod in the place of one that is lost: one that stands by, else a new one."""
        former = self._forget(node)
        if (pod := self._take_standby(node)) is not None:  # nothing of this needs the API server
            threading.Thread(target=self._tidy, args=[former, pod], name="ck-tidy", daemon=True).start()
        else:
            self.api.delete("Pod", former.place, grace_s=0)
            self.stand_ready([node])

    def _tidy(self, former: Pod, pod: Pod) -> None:
        """Have the API server know what has become of both."""
        self._drop(former)
        self._label(pod)

    def _take_standby(self, station: str) -> Pod | None:
        """A pod that stands by, for a station that has none; None if there is none that lives."""
        for name, pod in self.pods.items():
            if pod.stands_by and not self.holds_for_lost(name):
                self.pods[station] = self.pods.pop(name)
                pod.become(station)
                pod.is_displaced = bool(self._options.breakable) and station != COORDINATOR
                return pod
        return None

    def _label(self, pod: Pod) -> None:
        """Have people see what it is now."""
        with contextlib.suppress(ApiError):
            self.api.patch("Pod", pod.place, {"metadata": {"labels": {manifests.STATION: pod.station}}})

    async def renew(self, station: str) -> None:
        """The same as :meth:`replace`, while the event loop goes on; where the pod was forgotten already, too.

        Raises:
            ApiError, BadInput, HarnessError: if no pod can be made now, or it does not run in time.
        """
        if (former := self.pods.get(station)) is not None:
            await asyncio.to_thread(self.api.delete, "Pod", former.place, grace_s=0)
            self._forget(station)
        while (standby := self._take_standby(station)) is not None:
            if standby.link is not None and await standby.link.answers(ANSWER_S):
                await asyncio.to_thread(self._label, standby)
                return
            await self.give_up(station)
            self._forget(station)
        pod = self._expected(station)
        try:
            await asyncio.to_thread(self.api.create, self._manifest(pod))
            await self._arrived(pod)
        except BaseException:
            self._reception.give_up(pod.place)
            if pod.link is not None:
                pod.link.close()
            asyncio.get_running_loop().run_in_executor(None, self._drop, pod)
            raise
        self.pods[station] = pod

    def _drop(self, pod: Pod) -> None:
        """Delete a pod that is not needed; what is left of it goes before the next run (:meth:`settle_in`)."""
        with contextlib.suppress(ApiError):
            self.api.delete("Pod", pod.place, grace_s=0)

    async def _arrived(self, pod: Pod) -> None:
        """Wait until its supervisor can start programs, and say why that does not come."""
        begun_s, looked_s, shown = time.monotonic(), -math.inf, ""
        while pod.link is None or not pod.link.await_ready(0.0):
            if pod.link is None and (arrived := self._reception.await_any([pod.place], 0.0)) is not None:
                pod.come(arrived[1])
                self._lost.is_back(pod.machine)
            elif time.monotonic() > looked_s + _LOOK_S:
                looked_s = time.monotonic()
                told = await asyncio.to_thread(self._diagnosis.pending, [pod.station], [pod.place])
                if told and (text := "; ".join(map(str, told))) != shown:
                    self._tell(shown := text)
                if looked_s > begun_s + self._options.startup_s or any(one.is_final for one in told):
                    otherwise = f"no supervisor came to {self._runner}: can pods reach it?"
                    await asyncio.to_thread(self._diagnosis.raise_not_running, told, [pod.station], otherwise)
            await asyncio.sleep(_TURN_S)

    def holds_for_lost(self, station: str) -> bool:
        """Whether a station has no pod that lives, or that is on a machine which has fallen silent."""
        pod = self.pods.get(station)
        return pod is None or not pod.lives() or pod.machine in self._lost.avoided(time.monotonic())

    def expect_back(self, machine: str) -> None:
        """A machine that was lost is there again by the next run: what puts it back waits for that."""
        self._returning.add(machine)

    def settle_in(self) -> None:
        """Before a run: machines are back that were to come back. Pods that went elsewhere for want of one are made
        anew, where they would be by now, and those that came too late are deleted.
        """
        for machine in self._returning:
            self._lost.is_back(machine)
        self._returning.clear()
        if not self._lost.avoided(time.monotonic()):
            for station in [station for station, pod in self.pods.items() if pod.is_displaced]:
                self.remove(station)
        known = {pod.place for pod in self.pods.values()}
        for one in self._made():
            if one["metadata"]["labels"].get(manifests.PLACE) not in known:
                self.api.delete("Pod", one["metadata"]["name"], grace_s=0)

    def _made(self) -> Iterable[dict[str, Any]]:
        """The session's pods, as the API server has them, but the driver's."""
        return self.api.find("Pod", f"{manifests.selector(self.name)},{manifests.STATION}!={manifests.DRIVER_STATION}")

    async def give_up(self, station: str) -> None:
        """The machine of a station's pod is silent: forget the pod, and make none there for a while."""
        pod = self.pods[station]
        self._lost.lose(pod.machine, time.monotonic())
        pod.fell_silent = True
        if pod.link is not None:
            pod.link.close()
        with contextlib.suppress(ApiError):  # it is asked for again when the pod is replaced
            await asyncio.to_thread(self.delete, pod, 0)

    # -- its end --------------------------------------------------------------------------------------------------

    @property
    def is_driven(self) -> bool:
        """Whether a driver holds it; without one the coordinator's pod does."""
        return self._driven is not None

    def is_over(self) -> bool:
        """Whether it can have no runs any more. One without a driver goes with the coordinator's pod."""
        return not self.is_driven and not self.pods[COORDINATOR].lives()

    def close(self) -> None:
        """End everything in its pods, and delete all that it has made."""
        for pod in self.pods.values():
            if pod.link is not None:
                pod.link.close()
        self._reception.close()
        try:
            if self._ends is not None:
                end(self.api, self.name)
                self._ends.done()
                self._ends = None
            elif self._driven is not None:
                for pod in self.pods.values():
                    self.delete(pod, 0)
        finally:
            self.api.close()


def end(api: KubernetesApi, session: str) -> None:
    """Delete what a session has made: its job, with which everything goes, and its pods at once. Raises ApiError."""
    api.delete("Job", session)
    for pod in api.find("Pod", manifests.selector(session)):
        api.delete("Pod", pod["metadata"]["name"], grace_s=0)


def end_command(session: str, api: KubernetesApi) -> list[str]:
    """What ends a session from outside, for a guard that knows no Kubernetes, and may have another environment."""
    told = json.dumps({"session": session, "server": api.server, **api.place})
    return [sys.executable, "-m", "chaoskit.substrate.kubernetes.ending", told]


def new_name() -> str:
    """A name for a session and its objects."""
    return f"chaoskit-{secrets.token_hex(4)}"


def require_allowed(api: KubernetesApi) -> None:
    """Refuse a namespace whose owners have not said that runs may take place in it."""
    name = api.namespace
    if name.startswith("kube-"):
        raise BadInput("namespace", name, "use one of your own: this one is the cluster's")
    try:
        found = api.get("Namespace", name)
    except ApiError as error:
        if error.status == 404:
            raise BadInput("namespace", name, f"create it: kubectl create namespace {name}") from None
        raise BadInput("context", api.server, f"use a cluster that lets you in: {error}") from None
    if found["metadata"].get("labels", {}).get(manifests.ALLOWED) != manifests.ALLOWED_VALUE:
        remedy = f"kubectl label namespace {name} {manifests.ALLOWED}={manifests.ALLOWED_VALUE}"
        raise BadInput("namespace", name, f"allow runs that break things there: {remedy}")


def _address_towards(server: str) -> str:
    """This machine's address on the way to the API server: pods reach it if their network and that one are joined."""
    place = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((str(place.hostname), place.port or 443))
        address: str = way.getsockname()[0]
    return address
