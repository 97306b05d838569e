"""The backend of faults that are applied to machines and to the API server from outside.

-> kubernetes/machines/machines.py: which machine may be broken; machine_commands.py runs a lever.
kubernetes/machine_pods.py: the pods on a machine.
-> faults/kubernetes/machine.py has the faults that order these actions.
"""

from __future__ import annotations

import math
import threading
import time

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.external_commands import ExternalCommands
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.machine_pods import MachinePods
from chaoskit.substrate.kubernetes.machines.marks import CORDON, TAINT
from chaoskit.substrate.kubernetes.pods.actions import (
    MACHINE_ACTIONS,
    SERVER_SILENT_S,
    ApiServerStop,
    MachineDrain,
    MachineLoss,
    MachineTaint,
)

_ASK_AGAIN_S = 0.2


class MachineFaults:
    """Backend of actions that external commands carry out.

    Args:
        api: client of the cluster.
        pods: the pods on its machines.
        commands: runner of the external commands.
        own: machine of this process, which is not broken because the harness would be lost; "" if
            it is none of the cluster's.
    """

    actions = MACHINE_ACTIONS

    def __init__(
        self, api: KubernetesApi, pods: MachinePods, commands: ExternalCommands, own: str
    ) -> None:
        self._api, self._pods, self._commands, self._own = api, pods, commands, own
        self._applied: list[Applied] = []

    def apply(self, node: str, action: Action) -> Applied:
        """Begin an action on the machine of a node's pod, or on the API server.

        Return the handle that shows its evidence and undoes it, as :class:`Backend` does. The
        command runs in the background, so ``shown`` raises the HarnessError of a command that
        failed or was refused.

        Raises:
            ProcessLookupError: if the pod is gone or going.
            HarnessError: if the machine of the pod is unknown, or this process runs on it.
        """
        if isinstance(action, ApiServerStop):
            applied: Applied = _StoppedServer(
                self._commands, action.lever, action.lasts_s, self._api
            )
        else:
            applied = self._begin(action, self._pods.machine(node))
        self._applied.append(applied)
        return applied

    def _begin(self, action: Action, machine: str) -> Applied:
        """Begin an action on a machine, and return its handle.

        Raises HarnessError if the machine is unknown or this process runs on it.
        """
        if not machine:
            raise HarnessError("the fault was not applied: the machine of the pod is unknown")
        if machine == self._own:
            raise HarnessError(f"{machine} must not be broken: the harness of this run is on it")
        match action:
            case MachineLoss(lever):
                return _LostMachine(self._commands, lever, machine, self._pods)
            case MachineDrain(grace_s):
                return _DrainedMachine(self._commands, machine, self._pods, grace_s)
            case MachineTaint():
                return _TaintedMachine(self._commands, machine, self._pods)
        raise HarnessError(f"{type(action).__name__} is not an action on machines")

    def release(self, node: str | None = None) -> None:
        """Do nothing: no such action keeps processes from ending."""

    def close(self) -> None:
        """Undo all actions, and wait until that is done.

        Raises HarnessError that lists the undos that failed.
        """
        for applied in self._applied:
            applied.lift()
        self._commands.settle()


class _BegunCommand:
    """A command that was begun, and is undone once.

    Args:
        name: name of the lever or the mark.
        machine: machine that it acts on; "" for none.
        lasts_s: seconds after which it is undone by itself; inf for never.
    """

    def __init__(
        self, commands: ExternalCommands, name: str, machine: str, lasts_s: float = math.inf
    ) -> None:
        self._commands = commands
        self._number: int | None = commands.begin(name, machine, lasts_s)

    def is_done(self) -> bool:
        """Return whether the command was carried out, or its undo was begun.

        Raises HarnessError if the command failed.
        """
        return self._number is None or self._commands.is_done(self._number)

    def undo(self) -> None:
        """Begin the undo. If the undo fails, the run ends with an error."""
        number, self._number = self._number, None
        if number is not None:
            self._commands.end(number)


class _LostMachine:
    """A machine that a lever takes away. Its pods are silent once that has taken effect."""

    def __init__(
        self, commands: ExternalCommands, lever: str, machine: str, pods: MachinePods
    ) -> None:
        self._there = pods.of_run(machine)
        pods.plan_loss(machine)
        self._machine, self._pods = machine, pods
        self._command = _BegunCommand(commands, lever, machine)

    def shown(self) -> int:
        if not self._command.is_done():
            return 0
        for pod in self._there:
            pod.expect_silence()
        return 2 if self._there and all(pod.is_silent() for pod in self._there) else 1

    def lift(self) -> bool:
        self._pods.expect_back(self._machine)
        for pod in self._there:
            pod.expect_answers()
        self._command.undo()
        return True


class _TaintedMachine:
    """A taint on a machine, because of which the cluster empties it.

    The constructor begins the command that sets the taint, and announces the loss of the machine's
    pods. The effect is shown once the taint is set and all pods that were there are over.
    """

    def __init__(self, commands: ExternalCommands, machine: str, pods: MachinePods) -> None:
        self._there = pods.on(machine)
        pods.plan_loss(machine)
        self._command = _BegunCommand(commands, TAINT, machine)

    def shown(self) -> int:
        return int(self._command.is_done() and all(pod.is_over() for pod in self._there))

    def lift(self) -> bool:
        self._command.undo()
        return True


class _DrainedMachine:
    """A machine that is cordoned first, so that the pods that are evicted then cannot come back."""

    def __init__(
        self, commands: ExternalCommands, machine: str, pods: MachinePods, grace_s: int
    ) -> None:
        self._there = pods.on(machine)
        self._command = _BegunCommand(commands, CORDON, machine)
        self._alive = [pod for pod in self._there if pod.lives()]
        self._evicting = threading.Thread(
            target=self._evict, args=[grace_s], name="ck-drain", daemon=True
        )
        self._failure, self._is_refused, self._is_lifted = "", False, threading.Event()

    def _evict(self, grace_s: int) -> None:
        """Evict the pods of the machine until one eviction fails or the action is lifted.

        The refusal of a budget is noted, and the other pods are still evicted.
        """
        for pod in self._alive:
            if self._is_lifted.is_set():
                return
            try:
                pod.evict(grace_s)
            except ApiError as error:
                if not error.is_budget_refusal:
                    self._failure = str(error)
                    return
                self._is_refused = True  # a later end of the pod is no effect of this fault

    def shown(self) -> int:
        is_cordoned = self._command.is_done()
        if is_cordoned and self._evicting.ident is None:
            self._evicting.start()  # only now: pods evicted before the cordon may come back
        if self._failure:
            raise HarnessError(self._failure)
        if self._is_refused:
            return 0
        return int(is_cordoned and all(pod.is_over() for pod in self._there))

    def lift(self) -> bool:
        self._is_lifted.set()
        if self._evicting.ident is not None:
            self._evicting.join()
        self._command.undo()
        return True


class _StoppedServer:
    """An API server that a lever stops, probed until it does not answer."""

    def __init__(
        self, commands: ExternalCommands, lever: str, lasts_s: float, api: KubernetesApi
    ) -> None:
        self._api, self._is_silent, self._is_over = api, False, threading.Event()
        self._command = _BegunCommand(commands, lever, "", lasts_s)
        threading.Thread(target=self._ask, name="ck-api-probe", daemon=True).start()

    def _ask(self) -> None:
        """Probe the server until it has not answered for a while.

        Probes that fail at once are repeated during that time.
        """
        answered_s = time.monotonic()
        while not self._is_silent and not self._is_over.wait(_ASK_AGAIN_S):
            if self._api.answers(SERVER_SILENT_S):
                answered_s = time.monotonic()
            self._is_silent = time.monotonic() > answered_s + SERVER_SILENT_S

    def shown(self) -> int:
        self._command.is_done()  # raises HarnessError if the command failed
        return int(self._is_silent)

    def lift(self) -> bool:
        self._is_over.set()
        self._command.undo()
        return True
