"""The backend of what is done to a cluster from outside: to its machines, and to its API server."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence

from chaoskit.errors import HarnessError
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.external_commands import Errands
from chaoskit.substrate.kubernetes.api.requests import ApiError, EvictionRefused, KubernetesApi
from chaoskit.substrate.kubernetes.machines.marks import CORDON, TAINT
from chaoskit.substrate.kubernetes.pods.actions import (
    MACHINE_ACTIONS,
    SERVER_SILENT_S,
    ApiServerStop,
    MachineDrain,
    MachineLoss,
    MachineTaint,
)
from chaoskit.substrate.kubernetes.pods.pods import SessionPods
from chaoskit.substrate.kubernetes.session import Session

_ASK_AGAIN_S = 0.2


class Outside:
    """Has errands done.

    Args:
        own: the machine on which this process runs: it would break the harness itself. "" for none of the cluster's.
        nodes: of the run. Other pods of the session may be there still, and nothing watches these.
    """

    actions = MACHINE_ACTIONS

    def __init__(
        self, session: Session, errands: Errands, own: str, nodes: Callable[[], Sequence[str]]
    ) -> None:
        self._api, self._pods, self._errands, self._own = session.api, session.pods, errands, own
        self._nodes = nodes
        self._begun: list[_Outcome] = []

    def apply(self, node: str, action: Action) -> Applied:
        if isinstance(action, ApiServerStop):
            made: _Outcome = _StoppedServer(self._errands, action.lever, action.lasts_s, self._api)
        else:
            made = self._begin(action, self._pods.running(node).machine)
        self._begun.append(made)
        return made

    def _begin(self, action: Action, machine: str) -> _Outcome:
        if not machine:
            raise HarnessError("nothing is broken: it is not known on which machine the pod is")
        if machine == self._own:
            raise HarnessError(f"{machine} is not broken: what drives this run is there")
        match action:
            case MachineLoss(lever):
                return _LostMachine(
                    self._errands, lever, machine, self._pods, (COORDINATOR, *self._nodes())
                )
            case MachineDrain(grace_s):
                return _DrainedMachine(self._errands, machine, self._pods, grace_s)
            case MachineTaint():
                return _EmptiedMachine(self._errands, TAINT, machine, self._pods)
        raise HarnessError(f"{type(action).__name__} is not done from outside")

    def release(self, node: str | None = None) -> None:
        """Nothing of this keeps processes from ending."""

    def close(self) -> None:
        for one in self._begun:
            one.lift()
        self._errands.settle()


class _Outcome:
    """An errand that was begun, and what shows that it has taken effect."""

    def __init__(
        self, errands: Errands, errand: str, machine: str, lasts_s: float = math.inf
    ) -> None:
        self._errands = errands
        self._number: int | None = errands.begin(errand, machine, lasts_s)

    def shown(self) -> int:
        raise NotImplementedError

    def is_done(self) -> bool:
        return self._number is None or self._errands.is_done(self._number)

    def lift(self) -> bool:
        """Have it put back. Where that fails the run is an error."""
        number, self._number = self._number, None
        if number is not None:
            self._errands.end(number)
        return True


class _LostMachine(_Outcome):
    def __init__(
        self,
        errands: Errands,
        lever: str,
        machine: str,
        pods: SessionPods,
        stations: Collection[str],
    ) -> None:
        self._there = [pod for pod in pods.on(machine) if pod.station in stations and pod.lives()]
        pods.plan_loss(machine)
        self._machine, self._pods = machine, pods
        super().__init__(errands, lever, machine)

    def shown(self) -> int:
        if not self.is_done():
            return 0
        for pod in self._there:
            pod.kernel.is_doubted = True
        return 2 if self._there and all(pod.fell_silent for pod in self._there) else 1

    def lift(self) -> bool:
        self._pods.expect_back(self._machine)
        for pod in self._there:
            pod.kernel.is_doubted = False
        return super().lift()


class _EmptiedMachine(_Outcome):
    """A machine that the cluster empties by itself."""

    def __init__(self, errands: Errands, mark: str, machine: str, pods: SessionPods) -> None:
        self._there, self._pods = pods.on(machine), pods
        if mark == TAINT:  # a cordon ends no pod
            pods.plan_loss(machine)
        super().__init__(errands, mark, machine)

    def shown(self) -> int:
        return int(self.is_done() and all(map(self._pods.is_over, self._there)))


class _DrainedMachine(_EmptiedMachine):
    """One that is cordoned, and whose pods are evicted then: else they might come back to it."""

    def __init__(self, errands: Errands, machine: str, pods: SessionPods, grace_s: int) -> None:
        super().__init__(errands, CORDON, machine, pods)
        self._alive = [pod for pod in self._there if pod.lives()]
        self._evicting = threading.Thread(
            target=self._evict, args=[grace_s], name="ck-drain", daemon=True
        )
        self._failure, self._is_refused, self._is_lifted = "", False, threading.Event()

    def _evict(self, grace_s: int) -> None:
        for pod in self._alive:
            if self._is_lifted.is_set():
                return
            try:
                self._pods.evict(pod, grace_s)
            except EvictionRefused:  # what ends the pod later is another's doing
                self._is_refused = True
            except ApiError as error:
                self._failure = str(error)
                return

    def shown(self) -> int:
        if self.is_done() and self._evicting.ident is None:
            self._evicting.start()  # now: pods that are evicted before the cordon may come back there
        if self._failure:
            raise HarnessError(self._failure)
        return 0 if self._is_refused else super().shown()

    def lift(self) -> bool:
        self._is_lifted.set()
        if self._evicting.ident is not None:
            self._evicting.join()
        return super().lift()


class _StoppedServer(_Outcome):
    def __init__(self, errands: Errands, lever: str, lasts_s: float, api: KubernetesApi) -> None:
        self._api, self._is_silent, self._is_over = api, False, threading.Event()
        super().__init__(errands, lever, "", lasts_s)
        threading.Thread(target=self._ask, name="ck-api-probe", daemon=True).start()

    def _ask(self) -> None:
        """Until nothing was answered for a while; a request that is refused at once is one of several then."""
        answered_s = time.monotonic()
        while not self._is_silent and not self._is_over.wait(_ASK_AGAIN_S):
            if self._api.answers(SERVER_SILENT_S):
                answered_s = time.monotonic()
            self._is_silent = time.monotonic() > answered_s + SERVER_SILENT_S

    def shown(self) -> int:
        self.is_done()  # raises where it failed
        return int(self._is_silent)

    def lift(self) -> bool:
        self._is_over.set()
        return super().lift()
