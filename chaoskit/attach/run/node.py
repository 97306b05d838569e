"""A node of an attached run: a place of the job, with the hands in its present pod.

-> attach/run/lives.py: which container is present. attach/hands/: hands, and the kernel of a life.
attach/run/cluster.py: all nodes of a run.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from chaoskit.attach.hands.hand import ANSWER_S, Hand
from chaoskit.attach.hands.hand_container import EXEC, NETWORK, PROCESSES, HandMeans, HandRole
from chaoskit.attach.hands.hand_kernel import HandKernel
from chaoskit.attach.hands.ranks import why_unread
from chaoskit.attach.hands.start import HandPod, start_hand
from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.places import Place
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.jobs.watch import JobWatch
from chaoskit.attach.run.lives import (
    Lingering,
    PodLife,
    is_end_proved,
    is_left_behind,
    is_life_over,
    is_pod_over,
    present_life,
    why_over,
)
from chaoskit.attach.run.logs import AttachedLogs
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.journal import Journal
from chaoskit.stacks import LogPatterns
from chaoskit.substrate.core.launched_ranks import LOG, LaunchedRank
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.vocabulary import Event

Queried = TypeVar("Queried")
_LOOK_S = 0.5  # interval in which ranks are looked up
_ASK_AGAIN_S = 0.1  # pause after a question that a busy hand did not answer
_RETRY_S = 2.0  # pause after a hand that could not be started
_TRIES_MAX = 3  # hands of a role in one life
#: Seconds within which the API server shows the end of the container with which a hand has ended.
_END_SHOWN_S = 2.0
_LOG_AGAIN_S = 1.0  # pause between two looks for a rank in a log
_LOG_HEAD_BYTES = 1 << 20  # part of a log in which a rank is looked for
_INIT = 1  # pid of the first process of a container


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run that all of its nodes share.

    Attributes:
        api: client of the namespace of the job.
        watch: the places of the job.
        means: the means by which hands are started.
        needs_network: True if faults act on the network, so that each pod gets a network hand.
        patterns: the patterns for the logs; that of a rank counts where no process shows one.
    """

    api: KubernetesApi
    watch: JobWatch
    means: HandMeans
    needs_network: bool
    patterns: LogPatterns


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
        self._hand_life: PodLife | None = None  # in which the hand on processes was started
        self._hand_has_ended = False  # it is proved that this hand has ended
        self._network_uid = ""  # pod of the network hand
        self._followed_uid = ""  # newest pod whose log is followed
        self._journal: Journal | None = None
        self._logs: AttachedLogs | None = None
        self._recorded_life: PodLife | None = None
        self._silent_machine = ""  # the one that the journal has as silent
        self._ranks: dict[Process, LaunchedRank] = {}  # as the journal has them
        self._has_seen_ranks = False  # by the last look
        self._lingering = Lingering()  # of the present life
        self._logged_ranks: dict[PodLife, set[int]] = {}  # that the log of a life shows
        self._log_read_s = -math.inf
        self._hand_ended_s: dict[HandRole, float] = {}  # when a hand was last seen to have ended
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

        If none was, the first process has the rank that the log of its life shows.

        Raises:
            NodeUnreachable: if a container runs there, and its hand does not answer.
        """
        with self._lock:
            life, root, kernel = self._life, self._root, self._kernel
        if life is not None and root is not None and kernel is not None:
            ranks = kernel.launched_ranks(root)
            rank = None if ranks else self._logged_rank(life)
            return ranks if rank is None else {root: LaunchedRank(rank, LOG)}
        if present_life(self.place, self.container) is not None:
            raise self._unreachable()
        return {}

    def seen_ranks(self) -> dict[Process, LaunchedRank]:
        """Return the ranks that the thread has seen last. No request is made.

        Raises:
            NodeUnreachable: if a container runs there, and the last look at it has failed.
        """
        with self._lock:
            is_reached = self._root is not None
        if is_reached and self._has_seen_ranks:
            return self._ranks
        if present_life(self.place, self.container) is not None:
            raise self._unreachable()
        return {}

    def first_ranks(self) -> dict[Process, LaunchedRank]:
        """Return the same as :meth:`ranks` before the run, however busy the hand is.

        Raises:
            NodeUnreachable: if the hand has ended, or does not answer in ``ANSWER_S``.
        """
        return self._patiently(self.ranks)

    def _logged_rank(self, life: PodLife) -> int | None:
        """Return the rank by the log of a life; None if it does not show exactly one, or not yet."""
        if self._parts.patterns.rank is None:
            return None
        if life not in self._logged_ranks and time.monotonic() >= self._log_read_s + _LOG_AGAIN_S:
            self._log_read_s = time.monotonic()
            with contextlib.suppress(ApiError):  # it is read again
                text = self._parts.api.log_head(life.pod, self.container, _LOG_HEAD_BYTES)
                if ranks := self._parts.patterns.ranks(text.splitlines()):
                    self._logged_ranks[life] = ranks
        ranks = self._logged_ranks.get(life, set())
        return min(ranks) if len(ranks) == 1 else None

    def why_no_ranks(self) -> str:
        """Return why no process shows a rank; "" if one does."""
        if self.ranks():
            return ""
        if several := [ranks for ranks in self._logged_ranks.values() if len(ranks) > 1]:
            return f"its log shows the ranks {', '.join(map(str, sorted(several[-1])))}"
        reason = why_unread(self.hand(PROCESSES).ask("list")["processes"])
        return reason if self._parts.patterns.rank is None else f"{reason}, and its log shows none"

    def why_no_process(self) -> str:
        """Return why no process is known to have the rank of the log; "" if one is.

        The log does not say which of several processes has printed a line.
        """
        if any(launched.variable != LOG for launched in self.ranks().values()):
            return ""
        count = len(self.processes())
        if count == 1:
            return ""
        return f"{self.name} has {count} processes, and its log does not say which has the rank"

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
            self._see_ranks()
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
        if self._life is not None and self._is_left(self._life):
            self._end_life(self._life)
        self._record_life(present)
        if self._life is None:
            self._record_ranks({})
            if present is not None:
                self._begin(present)
        elif self._stands(PROCESSES):
            self._see_ranks()  # also if no network hand can be started
            self._renew_hands(self._life)
            return
        else:
            self._renew_hands(self._life)
        if self._life is not None:
            self._see_ranks()

    def _see_ranks(self) -> None:
        """Read the ranks and write their changes. Raises NodeUnreachable if that fails."""
        try:
            self._record_ranks(self.ranks())
        except NodeUnreachable:
            self._has_seen_ranks = False
            raise
        self._has_seen_ranks = True

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
        kernel = HandKernel(lambda: self._hand_in(life), lambda: self._is_proved_over(life))
        root = self._patiently(lambda: kernel.find(_INIT))
        with self._lock:
            self._life, self._kernel, self._root = life, kernel, root
        self.trouble = ""

    def _patiently(self, query: Callable[[], Queried]) -> Queried:
        """Return the result of a query, which is made again while a busy hand does not answer it.

        Raises:
            NodeUnreachable: if the hand has ended, or does not answer in ``ANSWER_S``.
        """
        until_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return query()
            except NodeUnreachable:
                if time.monotonic() > until_s or not self._stands(PROCESSES):
                    raise
            time.sleep(_ASK_AGAIN_S)

    def _renew_hands(self, life: PodLife) -> None:
        """Start the hands anew that have ended although the life goes on, and write that down."""
        roles = (PROCESSES, NETWORK) if self._parts.needs_network else (PROCESSES,)
        for role in roles:
            if self._stands(role):
                continue
            if role in self._hands:
                self._hand_ended_s[role] = time.monotonic()
                self._record_hand_end(role, life)
            self._close_hands(role)
            ended_s = self._hand_ended_s.get(role, -math.inf)
            # a start in a container that has just ended would keep the thread busy until it fails
            if not self._is_over(life) and time.monotonic() - ended_s >= _END_SHOWN_S:
                self._start(role, life)

    def _record_hand_end(self, role: HandRole, life: PodLife) -> None:
        """Write that a hand has ended."""
        if self._journal is not None:
            self._journal.write(
                Event.HAND_ENDED, role=role, uid=life.uid, container_id=life.container_id
            )

    def _hand_in(self, life: PodLife) -> Hand:
        """Return the hand on the processes of a life.

        Raises NodeUnreachable if there is none, also if one stands in a later life.
        """
        if life != self._hand_life:
            raise self._unreachable()
        return self.hand(PROCESSES)

    def _is_left(self, life: PodLife) -> bool:
        """Return whether the node leaves a life: its end is proved, or cannot be any more."""
        if self._is_proved_over(life) or is_left_behind(self._parts.watch.places(), life):
            return True
        answers = not self._is_over(life) or self._answers()
        return self._lingering.is_given_up(time.monotonic(), answers=answers)

    def _end_life(self, life: PodLife) -> None:
        """Leave a life, and end the hands that ended with it.

        Nothing is claimed of its processes unless its end is proved: its kernel reaches none.
        """
        is_proved = self._is_proved_over(life)
        with self._lock:
            kernel = self._kernel
            self._life = self._kernel = self._root = None
            self._has_seen_ranks = False
        self._lingering = Lingering()
        self._close_hands(PROCESSES)
        if is_pod_over(self._parts.watch.places(), life.uid):
            self._close_hands(NETWORK)
        if kernel is not None and is_proved:
            kernel.end()
        if not is_proved:
            self._ranks = {}  # so that no end of a process is written

    def _is_over(self, life: PodLife) -> bool:
        """Return whether the API server shows the end of a life, or has removed its pod."""
        places = self._parts.watch.places()
        return is_life_over(places, life.uid, life.container_id, self.container)

    def _is_proved_over(self, life: PodLife) -> bool:
        """Return whether none of the processes of a life runs any more."""
        hand = self._hands.get(PROCESSES)
        has_ended = self._hand_has_ended or (hand is not None and hand.has_ended)
        has_hand_ended = has_ended and life == self._hand_life
        places = self._parts.watch.places()
        return is_end_proved(places, life, self.container, has_hand_ended=has_hand_ended)

    def _answers(self) -> bool:
        """Return whether the hand on processes answers."""
        try:
            self.hand(PROCESSES).query("ping")
        except NodeUnreachable:
            return False
        return True

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
        source = self._parts.means.source(role)
        assert source is not None  # or the faults would have been refused
        self._tries[role, life] = tries + 1
        self._close_hands(role)
        pod_of_life = HandPod(life.pod, life.uid)
        hand = start_hand(self._parts.api, pod_of_life, self.container, role, source)
        self._hands[role] = hand
        if role == PROCESSES:
            self._hand_life, self._hand_has_ended = life, False
        if role == NETWORK:
            self._network_uid = life.uid
            hand.ask("sweep")

    def _close_hands(self, *roles: HandRole) -> None:
        """End hands."""
        for role in roles:
            if (hand := self._hands.pop(role, None)) is not None:
                if role == PROCESSES:
                    self._hand_has_ended = hand.has_ended
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
            hand = EXEC if self._parts.means.by_exec else PROCESSES
            self._journal.write(
                Event.LIFE_OBSERVED, container=self.container, hand=hand, **life._asdict()
            )
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
