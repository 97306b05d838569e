"""A node of an attached run: a place of the job, with the hands in its present pod.

-> attach/run/lives.py: which container is present. attach/hands/: hands, and the kernel of a life.
attach/run/cluster.py: all nodes of a run.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass

from chaoskit.attach.hands.hand import Hand
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandImage, HandRole
from chaoskit.attach.hands.hand_kernel import HandKernel
from chaoskit.attach.hands.ranks import why_unread
from chaoskit.attach.hands.start import HandPod, start_hand
from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.places import Place
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.jobs.watch import JobWatch
from chaoskit.attach.run.lives import (
    PodLife,
    is_left_behind,
    is_life_over,
    is_pod_over,
    present_life,
    why_over,
)
from chaoskit.attach.run.logs import AttachedLogs
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.journal import Journal
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.vocabulary import Event

_LOOK_S = 0.5  # interval in which ranks are looked up
_RETRY_S = 2.0  # pause after a hand that could not be started
_TRIES_MAX = 3  # hands of a role in one life
#: Seconds for which a pod that the API server has removed may still run; then it counts as over.
_LINGER_S = 15.0
_INIT = 1  # pid of the first process of a container


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run that all of its nodes share.

    Attributes:
        api: client of the namespace of the job.
        watch: the places of the job.
        image: image of the hands.
        needs_network: True if faults act on the network, so that each pod gets a network hand.
    """

    api: KubernetesApi
    watch: JobWatch
    image: HandImage
    needs_network: bool


class AttachedNode:
    """A place of a running job as a node.

    A thread starts hands in each new pod and each restarted container, and writes to the node's
    journal which lives and which ranks it sees.

    Args:
        parts: the parts of the run that all nodes share.
        key: the place.
        container: name of the container that trains.

    Attributes:
        name: the name of the node.
        key: the place.
        container: name of the container that trains.
        trouble: why the node is not reached at present; "" if it is.
        error: the unexpected error that has ended the thread; None for none.
    """

    def __init__(self, parts: RunParts, key: PlaceKey, container: str) -> None:
        self.name, self.key, self.container = key.node_name, key, container
        self.trouble = "no hand was started yet"
        self._parts = parts
        self._lock = threading.RLock()
        self._life: PodLife | None = None
        self._kernel: HandKernel | None = None
        self._root: Process | None = None
        self._hands: dict[HandRole, Hand] = {}
        self._network_uid = ""  # pod of the network hand
        self._followed_uid = ""  # newest pod whose log is followed
        self._journal: Journal | None = None
        self._logs: AttachedLogs | None = None
        self._recorded_life: PodLife | None = None
        self._left_behind = set[PodLife]()  # on silent machines; other pods have the place
        self._silent_machine = ""  # the one that the journal has as silent
        self._ranks: dict[Process, LaunchedRank] = {}  # as the journal has them
        self._over_since_s = math.inf  # since when the API server shows the end of the life
        self._tries: dict[tuple[HandRole, PodLife], int] = {}
        self.error: Exception | None = None
        self._woken, self._is_closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=f"node {self.name}", daemon=True)

    # -- what a run asks ---------------------------------------------------------------------------

    @property
    def place(self) -> Place | None:
        """The place with its present pod."""
        return self._parts.watch.places().place(self.key)

    @property
    def pod(self) -> PodState | None:
        """The pod that holds the place; None if there is none."""
        place = self.place
        return place.pod if place is not None else None

    @property
    def life(self) -> PodLife | None:
        """The life in which hands act; None while there is none."""
        return self._life

    def root(self) -> Process:
        """Return the first process of the container. Raises NodeUnreachable if none is known."""
        if self._root is None:
            raise self._unreachable()
        return self._root

    def processes(self) -> list[Process]:
        """Return the live processes of the container, the first one first; empty if it is over."""
        with self._lock:
            root, kernel = self._root, self._kernel
        if root is None or kernel is None:
            return []
        return kernel.tree(root)

    def ranks(self) -> dict[Process, LaunchedRank]:
        """Return the live processes that were started with a rank; empty if the place is empty.

        Raises:
            NodeUnreachable: if a container runs there, and its hand does not answer.
        """
        with self._lock:
            root, kernel = self._root, self._kernel
        if root is not None and kernel is not None:
            return kernel.launched_ranks(root)
        if present_life(self.place, self.container) is not None:
            raise self._unreachable()
        return {}

    def why_no_ranks(self) -> str:
        """Return why no process shows a rank; "" if one does."""
        return "" if self.ranks() else why_unread(self.hand(PROCESSES).ask("list")["processes"])

    def hand(self, role: HandRole) -> Hand:
        """Return a standing hand in the present pod. Raises NodeUnreachable if there is none."""
        hand = self._hands.get(role)
        if hand is None or not hand.is_open:
            raise self._unreachable()
        return hand

    def address(self) -> str:
        """Return the IP address of the present pod. Raises NodeUnreachable if it has none."""
        pod = self.pod
        if pod is None or not pod.address:
            raise self._unreachable()
        return pod.address

    def wake(self) -> None:
        """Have the thread look at the place now instead of at its next interval."""
        self._woken.set()

    # -- begin and end -----------------------------------------------------------------------------

    def reach(self) -> None:
        """Start the hands in the present pod, and read its ranks.

        Raises:
            HarnessError: if a hand cannot be started, or the place has no running container.
        """
        life = present_life(self.place, self.container)
        if life is None:
            raise HarnessError(f"{self.name} has no running container")
        self._begin(life)

    def observe(self, journal: Journal, logs: AttachedLogs) -> None:
        """Begin to write what is seen, and to follow the place and its log."""
        self._journal, self._logs = journal, logs
        self._follow()
        self._record_life(self._life)
        with contextlib.suppress(NodeUnreachable):  # the thread finds out why
            self._record_ranks(self.ranks())
        self._thread.start()

    def stop(self) -> None:
        """End the thread soon."""
        self._is_closing = True
        self._woken.set()

    def close(self) -> None:
        """End the thread and the hands, and with them all of their effects. Twice does no harm."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._close_hands(PROCESSES, NETWORK)
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close("the run has ended")

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Keep up with the place until the node is closed."""
        while not self._is_closing:
            self._woken.clear()
            pause_s = _LOOK_S
            try:
                self._keep_up()
                self.trouble = ""
            except HarnessError as error:  # a pod that is just going, or a server that is away
                self.trouble, pause_s = str(error), _RETRY_S
            except Exception as error:  # noqa: BLE001 - else the place would be frozen in silence
                self.trouble, self.error = repr(error), error
                return
            self._woken.wait(pause_s)

    def _keep_up(self) -> None:
        """Act upon the present state of the place once."""
        self._follow()
        self._record_silence()
        present = present_life(self.place, self.container)
        if self._life is not None and self._has_ended(self._life):
            self._end_life()
        self._record_life(present)
        if self._life is None:
            self._record_ranks({})
            if present is not None:
                self._begin(present)
        else:
            self._renew_hands(self._life)
        if self._life is not None and not self._silent_machine:
            self._record_ranks(self.ranks())

    def _follow(self) -> None:
        """Follow the log of a pod that has just taken the place."""
        pod = self.pod
        if self._logs is None or pod is None or pod.uid == self._followed_uid:
            return
        pod_object = self._parts.api.get("Pod", pod.name)
        if pod_object["metadata"]["uid"] == pod.uid:
            self._logs.follow(self.name, pod_object, self.container)
            self._followed_uid = pod.uid

    def _begin(self, life: PodLife) -> None:
        """Start the hands of a life that has begun."""
        if self._parts.needs_network and not (
            self._network_uid == life.uid and self._stands(NETWORK)
        ):
            self._start(NETWORK, life)
        self._start(PROCESSES, life)
        kernel = HandKernel(lambda: self._hand_of(life), lambda: self._is_over(life))
        root = kernel.find(_INIT)
        with self._lock:
            self._life, self._kernel, self._root = life, kernel, root
        self.trouble = ""

    def _renew_hands(self, life: PodLife) -> None:
        """Start the hands anew that have ended although the life goes on, and write that down."""
        roles = (PROCESSES, NETWORK) if self._parts.needs_network else (PROCESSES,)
        for role in roles:
            if self._stands(role):
                continue
            if role in self._hands and self._journal is not None:
                self._journal.write(
                    Event.HAND_ENDED, role=role, uid=life.uid, container_id=life.container_id
                )
            self._close_hands(role)
            if not self._is_over(life):
                self._start(role, life)

    def _has_ended(self, life: PodLife) -> bool:
        """Return whether a life is over by the API server, and by its hand if that still stands.

        The API server removes a pod that is deleted by force at once, and its processes may live on.
        A life on a silent machine counts as over once another pod holds the place.
        """
        if is_left_behind(self._parts.watch.places(), life):
            self._left_behind.add(life)
            return True
        if not self._is_over(life):
            self._over_since_s = math.inf
            return False
        self._over_since_s = min(self._over_since_s, time.monotonic())
        lingered_s = time.monotonic() - self._over_since_s
        return not self._stands(PROCESSES) or lingered_s > _LINGER_S

    def _end_life(self) -> None:
        """Note that the present life is over, and end the hands that ended with it."""
        with self._lock:
            life, kernel = self._life, self._kernel
            self._life = self._kernel = self._root = None
        self._over_since_s = math.inf
        self._close_hands(PROCESSES)
        if life is not None and is_pod_over(self._parts.watch.places(), life.uid):
            self._close_hands(NETWORK)
        if kernel is not None and life not in self._left_behind:
            kernel.end()

    def _hand_of(self, life: PodLife) -> Hand:
        """Return the hand on the processes of a life. Raises NodeUnreachable if there is none."""
        if life in self._left_behind:  # the hand of its successor knows nothing of its processes
            raise NodeUnreachable(f"{life.pod} is on the machine {life.machine}, which is silent")
        return self.hand(PROCESSES)

    def _is_over(self, life: PodLife) -> bool:
        """Return whether the API server proves the end of a life."""
        places = self._parts.watch.places()
        return is_life_over(places, life.uid, life.container_id, self.container)

    def _stands(self, role: HandRole) -> bool:
        """Return whether a hand stands."""
        hand = self._hands.get(role)
        return hand is not None and hand.is_open

    def _start(self, role: HandRole, life: PodLife) -> None:
        """Start a hand in the pod of a life. What a former network hand has left is removed.

        Raises:
            HarnessError: if it does not run in time, the pod is ending, or too many hands were
                started in this life: their containers stay in the pod.
        """
        pod, tries = self.pod, self._tries.get((role, life), 0)
        if pod is not None and pod.uid == life.uid and (pod.is_terminating or pod.is_node_silent):
            raise HarnessError(f"{life.pod} is ending, or its machine is silent")
        if tries >= _TRIES_MAX:
            raise HarnessError(f"{life.pod} got {tries} hands on its {role}, and none stands")
        self._tries[role, life] = tries + 1
        self._close_hands(role)
        hand = start_hand(
            self._parts.api, HandPod(life.pod, life.uid), self.container, role, self._parts.image
        )
        self._hands[role] = hand
        if role == NETWORK:
            self._network_uid = life.uid
            hand.ask("sweep")

    def _close_hands(self, *roles: HandRole) -> None:
        """End hands."""
        for role in roles:
            if (hand := self._hands.pop(role, None)) is not None:
                with contextlib.suppress(OSError):
                    hand.close()

    def _unreachable(self) -> NodeUnreachable:
        """Return the error of a request to the node while no hand stands there."""
        return NodeUnreachable(
            f"{self.name} is not reached: {self.trouble or 'its hand has ended'}"
        )

    # -- the journal -------------------------------------------------------------------------------

    def _record_ranks(self, ranks: dict[Process, LaunchedRank]) -> None:
        """Write which processes have got a rank, or have ended, since the last call."""
        if self._journal is None:
            return
        t_ns = time.monotonic_ns()  # after the hand was asked: an end is not dated before an act
        for process, launched in self._ranks.items():
            if process not in ranks:
                self._write_rank(self._journal, Event.RANK_GONE, process, launched, t_ns)
        for process, launched in ranks.items():
            if process not in self._ranks:
                self._write_rank(self._journal, Event.RANK_FOUND, process, launched, t_ns)
        self._ranks = ranks

    def _record_life(self, life: PodLife | None) -> None:
        """Write the end of the life that was recorded last, and the begin of the present one."""
        former_life = self._recorded_life
        if self._journal is None or life == former_life:
            return
        if former_life is not None:
            cause = why_over(self._parts.watch.places(), former_life, self.container)
            self._journal.write(
                Event.LIFE_ENDED,
                uid=former_life.uid,
                container_id=former_life.container_id,
                cause=cause,
            )
        if life is not None:
            self._journal.write(Event.LIFE_OBSERVED, container=self.container, **life._asdict())
        self._recorded_life = life

    def _record_silence(self) -> None:
        """Write that the machine of the pod has fallen silent, or is silent no longer."""
        place = self.place
        if self._journal is None or place is None:
            return
        since_s, machine = place.silent_since_s, place.pod.node if place.pod is not None else ""
        if since_s is not None and machine != self._silent_machine:
            self._journal.write(Event.MACHINE_SILENT, t_ns=int(since_s * 1e9), machine=machine)
        elif since_s is None and self._silent_machine:
            self._journal.write(Event.SILENCE_ENDED, machine=self._silent_machine)
        self._silent_machine = "" if since_s is None else machine

    @staticmethod
    def _write_rank(
        journal: Journal, event: Event, process: Process, launched: LaunchedRank, t_ns: int
    ) -> None:
        """Write that a process has, or had, a rank."""
        journal.write(
            event,
            t_ns=t_ns,
            rank=launched.rank,
            pid=process.pid,
            ticks=process.ticks,
            variable=launched.variable,
        )
