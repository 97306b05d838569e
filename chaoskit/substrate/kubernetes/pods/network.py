"""The pods' own network, and changes to it by a network helper in each pod.

-> substrate/network/packets.py drops and delays the packets, in the helper.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence

from chaoskit.errors import BadInput, HarnessError, NodeUnreachable
from chaoskit.substrate.cluster.network import COORDINATOR, PlainNetwork
from chaoskit.substrate.core.actions import Action, Applied, Backend
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.traffic import Block, Change, Degrade, Narrow, Unplug
from chaoskit.substrate.kubernetes.options import VARIABLE
from chaoskit.substrate.kubernetes.pods.pods import Pod
from chaoskit.substrate.network.packets import DropReceived, HoldReceived, SendEchoes
from chaoskit.substrate.supervisor.client import Listener, SupervisorLink
from chaoskit.substrate.supervisor.messages import AskEchoes
from chaoskit.substrate.supervisor.remote_node import AppliedAway, apply_away, why_not
from chaoskit.substrate.supervisor.stream import watch

_CONNECT_S = 3.0  # a missing pod may not answer; a lost packet is sent again after 1 s
_LOOK_S = 0.01
_ACTION_IN_POD: dict[type[Action], type[Action]] = {Block: DropReceived, Degrade: HoldReceived}
_NO_HELPER = (
    f"pods have no helper that may change their network: set {VARIABLE}NETWORK_FAULTS=allow"
)
_NOT_IN_PODS: dict[type[Action], str] = {
    Unplug: "the link of a pod is also the way to its supervisor: use Cut",
    Narrow: "rates are not limited in pods: use Delay",
}


def why_not_in_pods(action: type[Action], helper: SupervisorLink | None) -> str:
    """Return the reason why pods do not support a change of this kind, or "".

    Args:
        helper: link to the helper of a pod; None if pods have none.
    """
    if reason := _NOT_IN_PODS.get(action):
        return reason
    return _NO_HELPER if helper is None else why_not(helper, _ACTION_IN_POD[action])


class PodNetwork(PlainNetwork):
    """A network in which each pod has its own address.

    The constructor opens the listeners of the coordinator.

    Args:
        coordinator: link to the coordinator's supervisor.
        port: port of the coordinator; 0 for a free one.
        pod: returns the pod of a station; raises NodeUnreachable if it has none.
    """

    interface = "eth0"

    def __init__(self, coordinator: SupervisorLink, port: int, pod: Callable[[str], Pod]) -> None:
        self._pod = pod
        self.listen(coordinator, port)

    def listen(self, coordinator: SupervisorLink, port: int = 0) -> None:
        """Open the coordinator's listeners in its current pod.

        ``listeners``, ``address`` and ``store`` are set.

        Raises:
            BadInput: if ``port`` is not 0, and cannot be listened on.
            HarnessError: if a free port cannot be opened, or the supervisor is gone.
        """
        host = self.host(COORDINATOR)
        try:
            listener = coordinator.listen(host, port)
        except NodeUnreachable:
            raise
        except HarnessError as error:
            if not port:
                raise
            raise BadInput("port", port, f"use another one, or 0 for any: {error}") from None
        self.listeners: tuple[Listener, Listener] = listener, coordinator.listen(host, 0)
        self.address, self.store = (each.address for each in self.listeners)

    def host(self, name: str) -> str:
        return self._pod(name).address

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address, _CONNECT_S)
        watch(connection)
        return connection

    # -- changes and measurements ------------------------------------------------------------------

    def backends(self) -> Sequence[Backend]:
        return () if self._pod(COORDINATOR).helper is None else (PodPackets(self._pod),)

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]:
        with contextlib.closing(self.probe(source, target, timeout_s)) as probe:
            until_s = time.monotonic() + count * timeout_s
            while (
                len(results_ms := probe.results_ms()[:count]) < count and time.monotonic() < until_s
            ):
                time.sleep(_LOOK_S)
        return tuple(result_ms for result_ms in results_ms if result_ms is not None)

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        helper = self._pod(source).helper
        if helper is None:
            raise HarnessError(_NO_HELPER)
        return _HelperProbe(
            helper, apply_away(helper, source, SendEchoes(self.host(target), timeout_s))
        )


class _HelperProbe:
    """A probe whose echoes are sent by the helper of a pod."""

    def __init__(self, helper: SupervisorLink, sending: AppliedAway) -> None:
        self._helper, self._sending = helper, sending
        self._last_results_ms: list[float | None] = []
        self._is_closed = False

    def results_ms(self) -> list[float | None]:
        if not self._is_closed:
            self._last_results_ms = self._helper.request(
                AskEchoes, self._sending.number, answer_type=list[float | None]
            )
        return self._last_results_ms

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(NodeUnreachable):
                self._sending.lift()


class PodPackets:
    """Backend of changes to the traffic between pods. Each change is made in the receiving pods.

    Its methods raise HarnessError if a helper is missing or refuses. Pods that are gone are left
    out.

    Args:
        pod: returns the pod of a station; raises NodeUnreachable if it has none.
    """

    actions: frozenset[type[Action]] = frozenset(_ACTION_IN_POD)

    def __init__(self, pod: Callable[[str], Pod]) -> None:
        self._pod = pod

    def apply(self, node: str, action: Action) -> Applied:
        assert isinstance(action, Block | Degrade)
        sources: dict[str, list[str]] = {}
        for source, target in action.ways:
            if (pod := self._find_pod(source)) is not None:  # a missing pod sends nothing
                sources.setdefault(target, []).append(pod.address)
        changed_pods = _ChangedPods()
        try:
            for target, addresses in sources.items():
                pod = self._find_pod(target)
                if pod is None or not pod.lives():  # a missing pod receives nothing
                    continue
                if pod.helper is None:
                    raise HarnessError(f"the pod of {target} has no helper")
                changed_pods.add(
                    pod, apply_away(pod.helper, target, _received(action, tuple(addresses)))
                )
        except BaseException:
            changed_pods.lift()
            raise
        return changed_pods

    def _find_pod(self, station: str) -> Pod | None:
        """Return the pod of a station, or None if it is gone."""
        with contextlib.suppress(NodeUnreachable):
            return self._pod(station)
        return None

    def release(self, node: str | None = None) -> None:
        """Do nothing: no rule keeps a process from ending."""

    def close(self) -> None:
        """Do nothing: changes that were not lifted vanish with the pods."""


def _received(change: Change, sources: tuple[str, ...]) -> Action:
    """Return the action that makes a change in a pod which receives packets from ``sources``."""
    if isinstance(change, Block):
        return DropReceived(sources=sources, loud=change.loud, port=change.port, share=change.share)
    assert isinstance(change, Degrade)
    return HoldReceived(sources=sources, delay_ms=change.delay_ms, jitter_ms=change.jitter_ms)


class _ChangedPods:
    """A change that is made in several pods. The last count of a missing pod is kept."""

    def __init__(self) -> None:
        self._parts: dict[AppliedAway, int] = {}
        self._pods: dict[AppliedAway, Pod] = {}

    def add(self, pod: Pod, part: AppliedAway) -> None:
        """Add a pod in which the change was made."""
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
            except HarnessError:
                # the rules vanish with the pod, and no run uses a pod without its helper
                is_clean = is_clean and not pod.lives()
                if pod.helper is not None:
                    pod.helper.close()
        return is_clean
