"""The backend for actions on the traffic between the pods of a job that already runs.

-> attach/hands/pod_rules.py chooses the pods and the rules. ``chaoskit/hand/network/``: the hand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from chaoskit.attach.hands.hand import Answer, Hand, HandUnable
from chaoskit.attach.hands.pod_rules import (
    block_operation,
    block_rules,
    count_of,
    narrowed_nodes,
)
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.traffic import Block, Narrow, Way

#: Seconds after which an effect ends by itself, unless it is extended.
LASTS_S = 10.0
#: Port of new connections that show whether packets pass. Without a listener a reset comes back.
PROBE_PORT = 9
_EXTEND_SHARE = 0.3  # an effect is extended after so much of its time to live
_BEGIN_SHARE = 0.5  # all hands have to answer the begin within so much of it
_ANSWER_SHARE = 0.1  # a hand that needs longer for an extension or a count is silent
_KERNEL_S = 1.0  # the kernel and the line to the hand may be late by this
_LIFT_S = 3.0  # a call of nft may take as long
_TRY_AGAIN_S = 0.2
_CONNECT_S = 0.7  # below the limit of a query
_HEAL_S = 5.0  # a new connection must pass so soon after the rules are gone

Result = Mapping[str, Any] | HarnessError


class NewConnection(NamedTuple):
    """Result of a new TCP connection from one pod to another.

    Attributes:
        how: ``connected``, ``refused`` by a reset, ``timeout``, or the name of an error.
        took_ms: milliseconds until then.
    """

    how: str
    took_ms: float


class HandTraffic:
    """Backend that blocks and narrows the traffic between pods by hands in them.

    An effect ends by itself ``lasts_s`` after its last extension. One thread extends all effects
    until they are lifted, so that they end if this process is killed. The kernel keeps the time of
    a :class:`Block`. The hand keeps that of a :class:`Narrow`, which limits what pods send; what
    they receive cannot be limited in them. Ways of one source share its limit.

    Args:
        hand: returns the standing network hand in the pod of a node. It raises NodeUnreachable or
            HarnessError if there is none.
        address: returns the IP address of a node's pod; raises NodeUnreachable if it has none.
        lasts_s: time to live of an effect in seconds.
    """

    actions: frozenset[type[Action]] = frozenset({Block, Narrow})

    def __init__(
        self,
        hand: Callable[[str], Hand],
        address: Callable[[str], str],
        *,
        lasts_s: float = LASTS_S,
    ) -> None:
        self._hand, self._address = hand, address
        self._lasts_s = lasts_s
        self._lock = (
            threading.Lock()
        )  # held while requests are sent, so that no extension follows a lift
        self._applied: list[HandEffects] = []
        self._closing = threading.Event()
        self._extender: threading.Thread | None = None

    def apply(self, node: str, action: Action) -> Applied:
        """Carry out an action in the pods that it names.

        Raises:
            NodeUnreachable: if a pod is gone, or its hand does not answer.
            HarnessError: if hands cannot carry the action out. Nothing of it is left.
        """
        assert isinstance(action, Block | Narrow)
        parts = self._block(action) if isinstance(action, Block) else self._narrow(action)
        loud_ways = action.ways if isinstance(action, Block) and action.loud else ()
        is_healed = self._proof_of_healing(action) if isinstance(action, Block) else lambda: True
        effects = HandEffects(parts, self._lock, self._lasts_s, self._forget, loud_ways, is_healed)
        self._start_extender()
        effects.begin(self._keep)
        return effects

    def release(self, node: str | None = None) -> None:
        """Do nothing: no rule keeps a process from ending."""

    def close(self) -> None:
        """Lift all effects, and end the thread. The hands stay."""
        with self._lock:
            applied = list(self._applied)
        for effects in applied:
            effects.lift()
        self._closing.set()
        if self._extender is not None:
            self._extender.join()

    def is_reachable(self, source: str, target: str, port: int = PROBE_PORT) -> bool:
        """Return whether packets pass between two pods in both directions, by a new connection.

        A connection that the other side refuses is an answer of it. It counts, unless rules of this
        backend refuse segments between the two pods.

        Raises:
            NodeUnreachable: if a pod is gone, or the hand of the source does not answer.
        """
        how = self.connect(source, target, port).how
        with self._lock:
            loud_ways = {way for effects in self._applied for way in effects.loud_ways}
        is_loud = not loud_ways.isdisjoint({(source, target), (target, source)})
        return how == "connected" or (how == "refused" and not is_loud)

    def connect(self, source: str, target: str, port: int = PROBE_PORT) -> NewConnection:
        """Open a TCP connection from the pod of one node to that of another, and close it.

        Raises:
            NodeUnreachable: if a pod is gone, or the hand of the source does not answer.
        """
        answer = self._hand(source).query(
            "connect", address=self._address(target), port=port, within_s=_CONNECT_S
        )
        return NewConnection(answer.get("error", answer["how"]), answer["took_ms"])

    def _proof_of_healing(self, change: Block) -> Callable[[], bool]:
        """Return the question whether a new connection passes again where it passes now.

        It is asked once the rules are gone. Where no connection passes now, as a network policy of
        the cluster may have it, there is nothing to prove.
        """
        rules = block_rules(change)[0]
        source, target = rules.node, rules.peers[0]
        addresses = self._address(source), self._address(target)
        if not self.is_reachable(source, target):
            return lambda: True
        return partial(self._passes_again, source, target, addresses)

    def _passes_again(self, source: str, target: str, addresses: tuple[str, str]) -> bool:
        """Return whether a new connection passes between two pods within some seconds.

        Nothing can be asked if one of them was replaced, or if another block holds there.
        """
        until_s = time.monotonic() + _HEAL_S
        while True:
            try:
                if (self._address(source), self._address(target)) != addresses:
                    return True
                if self.is_reachable(source, target):
                    return True
            except NodeUnreachable:  # its rules ended by themselves, or went with its pod
                return True
            with self._lock:
                has_others = bool(self._applied)
            if has_others or time.monotonic() > until_s:
                return has_others
            time.sleep(_TRY_AGAIN_S)

    # -- the parts of an action --------------------------------------------------------------------

    def _block(self, change: Block) -> list[PodEffect]:
        operation, fields = block_operation(change)
        return [
            self._part(
                rules.node,
                operation,
                addresses=[self._address(peer) for peer in rules.peers],
                directions=list(rules.directions),
                **fields,
            )
            for rules in block_rules(change)
        ]

    def _narrow(self, change: Narrow) -> list[PodEffect]:
        rate_bit_s = round(change.bits_per_s)
        return [
            self._part(node, "bandwidth", rate_bit_s=rate_bit_s) for node in narrowed_nodes(change)
        ]

    def _part(self, node: str, operation: str, **fields: Any) -> PodEffect:
        own_address = self._address(node)
        return PodEffect(
            self._hand(node), operation, fields, partial(self._has_pod, node, own_address)
        )

    def _has_pod(self, node: str, address: str) -> bool:
        """Return whether the pod of a node is still the one with an address."""
        try:
            return self._address(node) == address
        except NodeUnreachable:
            return False

    # -- the thread that extends -------------------------------------------------------------------

    def _keep(self, effects: HandEffects) -> None:
        self._applied.append(effects)

    def _forget(self, effects: HandEffects) -> None:
        if effects in self._applied:
            self._applied.remove(effects)

    def _start_extender(self) -> None:
        with self._lock:
            if self._extender is None:
                self._extender = threading.Thread(
                    target=self._extend_all, name="ck-extend", daemon=True
                )
                self._extender.start()

    def _extend_all(self) -> None:
        """Extend all effects again and again, until the backend is closed."""
        while not self._closing.wait(_EXTEND_SHARE * self._lasts_s):
            with self._lock:
                parts = [part for effects in self._applied for part in effects.parts]
                sent = _send(partial(part.extend, self._lasts_s) for part in parts)
            results = _results(sent, _ANSWER_SHARE * self._lasts_s)
            for part, result in zip(parts, results, strict=True):
                part.note(result)


class PodEffect:
    """An effect of one hand.

    Args:
        hand: the hand.
        operation: the operation that begins it.
        fields: fields of the operation, without the time to live.
        has_pod: returns whether the pod of the hand exists still.

    Attributes:
        count: packets that it has met so far, as last counted.
        has_begun: True once the hand has confirmed it.
        is_answering: False while the hand does not answer.
        has_expired: True if the hand has ended it by itself.
    """

    def __init__(
        self, hand: Hand, operation: str, fields: Mapping[str, Any], has_pod: Callable[[], bool]
    ) -> None:
        self.hand = hand
        self._operation, self._fields, self._has_pod = operation, fields, has_pod
        self._number = 0
        self._over_s = 0.0
        self.count = 0
        self.has_begun = self.has_expired = False
        self.is_answering = True

    def begin(self, lasts_s: float) -> Answer:
        """Have the hand begin the effect."""
        self._over_s = time.monotonic() + lasts_s
        return self.hand.post(self._operation, **self._fields, lasts_s=lasts_s)

    def extend(self, lasts_s: float) -> Answer:
        """Let the effect last so long from now on."""
        self._over_s = time.monotonic() + lasts_s
        return self.hand.post("extend", effect=self._number, lasts_s=lasts_s)

    def counters(self) -> Answer:
        """Ask for the counters of the effect."""
        return self.hand.post("counters", effect=self._number)

    def lift(self) -> Answer:
        """Have the hand end the effect."""
        return self.hand.post("lift", effect=self._number)

    def note_begin(self, result: Mapping[str, Any]) -> None:
        """Take over the answer to the begin."""
        self.has_begun, self._number = True, result["number"]

    def note(self, result: Result) -> None:
        """Take over an answer to an extension or to a question for counters."""
        if isinstance(result, HarnessError):
            self.is_answering = not isinstance(result, NodeUnreachable)
            self.has_expired = self.has_expired or _is_refused(result)
            return
        self.is_answering = True
        self.count = max(self.count, count_of(result))

    def is_lifted(self, result: Result) -> bool:
        """Return whether nothing is left of the effect, by the answer to a lift.

        A hand that does not answer shows it, if its pod is gone, or if the time to live is over.
        Only the kernel's time counts for that: the hand itself keeps that of a limit of bandwidth.
        """
        if not isinstance(result, HarnessError):
            self.count = max(self.count, count_of(result))
            return True
        if _is_refused(result):  # the effect has ended before
            return True
        if not self.hand.is_open and not self._has_pod():
            return True
        return self.is_time_over() and self._operation != "bandwidth"

    def is_time_over(self) -> bool:
        """Return whether the time to live is over, with all delays."""
        return time.monotonic() > self._over_s + _KERNEL_S


class HandEffects:
    """An action that hands carry out in several pods, until it is lifted.

    Args:
        parts: the effect in each pod.
        lock: held while requests are sent.
        lasts_s: time to live of the effects in seconds.
        forget: called, under the lock, before the effects are lifted: they are not extended then.
        loud_ways: ways on which TCP segments are refused.
        is_healed: returns whether packets pass again; asked once nothing is left of the effects.

    Attributes:
        parts: the effects that have begun.
    """

    def __init__(
        self,
        parts: Sequence[PodEffect],
        lock: threading.Lock,
        lasts_s: float,
        forget: Callable[[HandEffects], None],
        loud_ways: Sequence[Way] = (),
        is_healed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_healed = is_healed
        self.parts, self.loud_ways = list(parts), tuple(loud_ways)
        self._lock, self._lasts_s, self._forget = lock, lasts_s, forget
        self._lift_lock = threading.Lock()
        self._is_lifting = False
        self._is_clean: bool | None = None

    def begin(self, keep: Callable[[HandEffects], None]) -> None:
        """Begin the effects in all pods at the same time.

        Args:
            keep: called, under the lock, once all have begun. They are extended from then on.

        Raises:
            HarnessError: the first error without an answer, or the first one, after the effects that
                have begun were lifted. An effect whose begin had no answer ends after its time to
                live.
        """
        sent = _send(partial(part.begin, self._lasts_s) for part in self.parts)
        results = _results(sent, _BEGIN_SHARE * self._lasts_s)
        for part, result in zip(self.parts, results, strict=True):
            if not isinstance(result, HarnessError):
                part.note_begin(result)
        errors = [result for result in results if isinstance(result, HarnessError)]
        if errors:
            self.parts = [part for part in self.parts if part.has_begun]
            self.lift()
            # rules of a hand that did not answer may drop packets until their time is over
            raise next(
                (
                    error
                    for error in errors
                    if isinstance(error, NodeUnreachable) and error.may_have_acted
                ),
                errors[0],
            )
        with self._lock:
            keep(self)

    def shown(self) -> int:
        """Return the packets that the rules in all pods have met.

        A hand that is gone, or does not answer, adds its last count.

        Raises:
            HarnessError: if an effect has ended before it was lifted, and its hand lives.
        """
        with self._lock:
            asked = [part for part in self.parts if part.is_answering and not self._is_lifting]
            sent = _send(part.counters for part in asked)
        for part, result in zip(asked, _results(sent, _ANSWER_SHARE * self._lasts_s), strict=True):
            part.note(result)
        expired = [part.hand.name for part in self.parts if part.has_expired]
        if expired and self._is_clean is None:
            raise HarnessError(
                f"{', '.join(expired)}: the effect has ended before it was lifted, as it was not"
                " extended in time: give this process enough CPU time"
            )
        return sum(part.count for part in self.parts)

    def lift(self) -> bool:
        """End the effects in all pods, and return True if nothing is left, and packets pass again.

        No effect is extended any more from the beginning of the call. So an effect whose hand does
        not answer ends by itself; the call waits for that.
        """
        with self._lift_lock:
            if self._is_clean is None:
                with self._lock:
                    self._is_lifting = True
                    self._forget(self)
                self._is_clean = self._lift_parts() and self._is_healed()
            return self._is_clean

    def _lift_parts(self) -> bool:
        """Lift the effects until nothing is left, or their time is over."""
        left = self.parts
        while True:
            results = _results(_send(part.lift for part in left), min(_LIFT_S, self._lasts_s))
            left = [
                part
                for part, result in zip(left, results, strict=True)
                if not part.is_lifted(result)
            ]
            if not left or all(part.is_time_over() for part in left):
                return not left
            time.sleep(_TRY_AGAIN_S)


def _send(posts: Iterable[Callable[[], Answer]]) -> list[Answer | HarnessError]:
    """Send requests, and return for each the function that waits for its answer, or its error."""
    sent: list[Answer | HarnessError] = []
    for post in posts:
        try:
            sent.append(post())
        except HarnessError as error:
            sent.append(error)
    return sent


def _results(sent: Iterable[Answer | HarnessError], limit_s: float) -> list[Result]:
    """Return the answers to requests, or their errors. The time limit holds for all together."""
    until_s = time.monotonic() + limit_s
    results: list[Result] = []
    for answer in sent:
        try:
            if isinstance(answer, HarnessError):
                raise answer
            results.append(answer(max(0.0, until_s - time.monotonic())))
        except HarnessError as error:
            results.append(error)
    return results


def _is_refused(error: HarnessError) -> bool:
    """Return whether a hand has refused a request as bad input: it has no such effect."""
    return not isinstance(error, NodeUnreachable | HandUnable)
