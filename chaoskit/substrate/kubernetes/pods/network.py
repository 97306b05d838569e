"""The pods' own network, and how it is broken: by a helper in each pod, which may change the network of that pod."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence

from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate.cluster.network import COORDINATOR, PlainNetwork
from chaoskit.substrate.core.actions import Action, Applied, Backend
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.traffic import Block, Change, Degrade, Narrow, Unplug
from chaoskit.substrate.kubernetes.options import VARIABLE
from chaoskit.substrate.kubernetes.pods.pods import Pod
from chaoskit.substrate.network.packets import DropReceived, HoldReceived, SendEchoes
from chaoskit.substrate.supervisor.client import Listener, SupervisorGone, SupervisorLink
from chaoskit.substrate.supervisor.messages import AskEchoes
from chaoskit.substrate.supervisor.remote_node import AppliedAway, apply_away, why_not
from chaoskit.substrate.supervisor.stream import watch

_CONNECT_S = (
    3.0  # a pod that is gone may not answer at all; one lost packet is sent again after a second
)
_LOOK_S = 0.01
_DONE_BY: dict[type[Action], type[Action]] = {Block: DropReceived, Degrade: HoldReceived}
_NO_HELPER = f"pods have no helper that may change their network: {VARIABLE}NETWORK_FAULTS=allow"
_NOT_IN_PODS: dict[type[Action], str] = {
    Unplug: "the link of a pod is also the way to its supervisor: use Cut",
    Narrow: "rates are not limited in pods: use Delay",
}


def why_not_in_pods(action: type[Action], helper: SupervisorLink | None) -> str:
    """Why a change of this kind is not made to the network of pods; "" if it is.

    Args:
        helper: that of a pod; None where they have none.
    """
    if reason := _NOT_IN_PODS.get(action):
        return reason
    return _NO_HELPER if helper is None else why_not(helper, _DONE_BY[action])


class PodNetwork(PlainNetwork):
    """Each pod has an address.

    Args:
        coordinator: its supervisor. pod: of a station; raises SupervisorGone where that has none.
    """

    interface = "eth0"

    def __init__(self, coordinator: SupervisorLink, port: int, pod: Callable[[str], Pod]) -> None:
        self._pod = pod
        self.listen(coordinator, port)

    def listen(self, coordinator: SupervisorLink, port: int = 0) -> None:
        """Have the coordinator's listeners in the pod that is its now. Raises BadInput if ``port`` is in use."""
        host = self.host(COORDINATOR)
        try:
            first = coordinator.listen(host, port)
        except SupervisorGone:
            raise
        except HarnessError as error:
            if not port:
                raise
            raise BadInput("port", port, f"use another one, or 0 for any: {error}") from None
        self.listeners: tuple[Listener, Listener] = first, coordinator.listen(host, 0)
        self.address, self.store = (listener.address for listener in self.listeners)

    def host(self, name: str) -> str:
        return self._pod(name).address

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address, _CONNECT_S)
        watch(connection)
        return connection

    # -- how it is broken, and measured ---------------------------------------------------------------------------

    def backends(self) -> Sequence[Backend]:
        return () if self._pod(COORDINATOR).helper is None else (PodPackets(self._pod),)

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]:
        with contextlib.closing(self.probe(source, target, timeout_s)) as probe:
            until_s = time.monotonic() + count * timeout_s
            while len(found := probe.results_ms()[:count]) < count and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
        return tuple(one for one in found if one is not None)

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        helper = self._pod(source).helper
        if helper is None:
            raise HarnessError(_NO_HELPER)
        return _EchoesAway(
            helper, apply_away(helper, source, SendEchoes(self.host(target), timeout_s))
        )


class _EchoesAway:
    """Echoes that the helper of a pod sends."""

    def __init__(self, helper: SupervisorLink, sending: AppliedAway) -> None:
        self._helper, self._sending = helper, sending
        self._last: list[float | None] = []
        self._is_closed = False

    def results_ms(self) -> list[float | None]:
        if not self._is_closed:
            self._last = self._helper.request(
                AskEchoes, self._sending.number, value=list[float | None]
            )
        return self._last

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(SupervisorGone):
                self._sending.lift()


class PodPackets:
    """The backend of changes to what goes between pods. Each is made in the pods that receive."""

    actions: frozenset[type[Action]] = frozenset(_DONE_BY)

    def __init__(self, pod: Callable[[str], Pod]) -> None:
        self._pod = pod

    def apply(self, node: str, action: Action) -> Applied:
        assert isinstance(action, Block | Degrade)
        sources: dict[str, list[str]] = {}
        for source, target in action.ways:
            if (pod := self._found(source)) is not None:  # what is gone sends nothing
                sources.setdefault(target, []).append(pod.address)
        changed = _ChangedPods()
        try:
            for target, addresses in sources.items():
                pod = self._found(target)
                if pod is None or not pod.lives():  # and receives nothing
                    continue
                if pod.helper is None:
                    raise HarnessError(f"the pod of {target} has no helper")
                changed.add(
                    pod, apply_away(pod.helper, target, _received(action, tuple(addresses)))
                )
        except BaseException:
            changed.lift()
            raise
        return changed

    def _found(self, station: str) -> Pod | None:
        with contextlib.suppress(SupervisorGone):
            return self._pod(station)
        return None

    def release(self, node: str | None = None) -> None:
        """No rule keeps a process from ending."""

    def close(self) -> None:
        """What was not lifted goes with the pods."""


def _received(change: Change, sources: tuple[str, ...]) -> Action:
    """A change, as it is made where packets from these addresses are received."""
    if isinstance(change, Block):
        return DropReceived(sources=sources, loud=change.loud, port=change.port, share=change.share)
    assert isinstance(change, Degrade)
    return HoldReceived(sources=sources, delay_ms=change.delay_ms, jitter_ms=change.jitter_ms)


class _ChangedPods:
    """A change that is made in several pods. Those that are gone count as far as they were heard."""

    def __init__(self) -> None:
        self._parts: dict[AppliedAway, int] = {}
        self._pods: dict[AppliedAway, Pod] = {}

    def add(self, pod: Pod, part: AppliedAway) -> None:
        """It is made in one more."""
        self._parts[part], self._pods[part] = 0, pod

    def shown(self) -> int:
        for part, pod in self._pods.items():
            try:
                self._parts[part] = part.shown()
            except HarnessError:
                if pod.lives():
                    raise
        return sum(self._parts.values())

    def lift(self) -> bool:
        is_clean = True
        for part, pod in self._pods.items():
            try:
                is_clean = part.lift() and is_clean
            except (
                HarnessError
            ):  # the rules go with the pod, and no run has a pod without its helper
                is_clean = is_clean and not pod.lives()
                if pod.helper is not None:
                    pod.helper.close()
        return is_clean
