"""Faults of the machine below a pod, and of the API server: the user's commands break both.

-> substrate/kubernetes/machine_faults.py begins each action and shows its evidence.
-> substrate/core/external_commands.py runs the commands and their undo.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import ApiServer, Evidence, MachineSilent, ServerSilent
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.kubernetes.pod import EXAMPLE, pods_over, pods_unavailable, require_grace_s
from chaoskit.faults.nodes.coordinator import CONTROL_UNLISTED
from chaoskit.faults.nodes.node import NODE_LOST_CAUSES
from chaoskit.faults.processes.signals import look_up
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.kubernetes.machines import machine_commands
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions, in_a_pod
from chaoskit.substrate.kubernetes.pods.actions import (
    ANSWER_S,
    SERVER_SILENT_S,
    ApiServerStop,
    MachineDrain,
    MachineLoss,
    MachineTaint,
)

_EMPTIED = (
    "the connections to the first processes of all pods of the run on the machine have ended, and the API server "
    "has none of them any more, or says that they have ended"
)
_EMPTIED_IMPACT = "the nodes on it are given up; with grace and an elastic policy they leave"
#: A job that runs already has no supervisors: the API server asks the kubelet for logs.
_SILENCE_SOURCE = "the streams to supervisors there, or the requests to its kubelet"
_STANDS_S = 0.3  # longest wait of the rank for the command: others would take it for hung


def _options() -> KubernetesOptions:
    return KubernetesOptions.from_environment(os.environ)


def _lacks_machines(options: KubernetesOptions) -> str:
    """Return what is missing to break a machine, with its remedy; "" if nothing is."""
    if options.driven is None and not options.has_driver and in_a_pod() and not options.own_machine:
        return f"name the machine on which pytest runs, so that it is not broken: {VARIABLE}OWN_MACHINE=NAME"
    if not options.breakable:
        return f"name the machines that may be broken: {VARIABLE}MACHINES=worker-7,worker-8"
    return ""


def _lacks_levers(options: KubernetesOptions) -> str:
    """Return the reason why no command is configured; "" if one is, or none is needed.

    A driver needs none: its client runs the commands.
    """
    if options.driven is None and not options.levers:
        return (
            f"name a file with the commands that break them, and their undo: {VARIABLE}LEVERS=FILE"
        )
    return ""


def _require_lever(name: str, *, machines: bool) -> None:
    """Raise BadInput unless a command of that name is configured.

    Runs of a driver pass, as its client has the commands. Runs without a file of commands pass,
    too: :func:`_lacks_levers` refuses them.

    Args:
        machines: the command must be for a machine; False for a command without a machine.
    """
    options = _options()
    if options.driven is not None or not options.levers:
        return
    commands = machine_commands.read(options.levers)
    fitting = [command for command, lever in commands.items() if lever.is_for_machines is machines]
    if name not in fitting:
        kind = "with {machine} in its words" if machines else "without {machine}"
        raise BadInput(
            "lever",
            name,
            f"use one of {options.levers} {kind}: {', '.join(fitting) or 'there is none'}",
        )


@dataclass(frozen=True, kw_only=True)
class LoseMachine(Fault):
    """Take away the machine of the rank's pod, with all pods of the run on it.

    A command does it, such as a power cut.

    Args:
        lever: name of the command.
        back_after_s: seconds after the act at which its undo runs, if the loss was seen by then;
            None for the end of the run.
    """

    lever: str = "power-cut"
    back_after_s: float | None = None

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    is_felt: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    needs_standby: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    needs: ClassVar[tuple[type[Action], ...]] = (MachineLoss,)
    evidence_s: ClassVar[float] = ANSWER_S
    effect: ClassVar[str] = (
        "one machine of the cluster is gone in silence, with every pod that is on it"
    )
    evidence: ClassVar[str] = (
        "the command ended well, and nothing on that machine answers any more: no supervisor of the run, "
        "or no kubelet if the job has no supervisors"
    )
    stands_for: ClassVar[str] = "machines that lose their power or their network"
    counted: ClassVar[tuple[IncidentKind, ...]] = (
        incidents.POWER,
        incidents.CHASSIS,
        incidents.KERNEL_PANIC,
    )
    impact: ClassVar[str] = (
        "the nodes on it are given up within their leases; the API server notices much later"
    )
    undo: ClassVar[str] = "the undo of the command, by the process that ran it, or by its guard"
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable(lambda options: _lacks_machines(options) or _lacks_levers(options))

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.back_after_s is not None:
            require_seconds("back_after_s", self.back_after_s)

    def require(self, config: RunConfig) -> None:
        _require_lever(self.lever, machines=True)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        lost = target.cluster.together(target.node)
        target.struck_nodes = set(lost)
        with target.holding(target.cluster.apply(target.node, MachineLoss(self.lever))) as machine:
            await target.seen(lambda: machine.shown() or None, limit_s=_STANDS_S)
            target.release()
            await target.seen(lambda: machine.shown() == 2 or None)
            words = f"the machine of {', '.join(lost)} does not answer, nor does anything of the run there"
            yield MachineSilent(subject=target.whole_node, source=_SILENCE_SOURCE, seen=words)
            if self.back_after_s is None:
                await target.until_end()
            else:
                await target.sleep(self.back_after_s - target.seconds_since)
        target.lifted()


@dataclass(frozen=True, kw_only=True)
class DrainMachine(Fault):
    """Drain the machine of the rank's pod, as ``kubectl drain`` does.

    The machine is cordoned, then the pods of the run there are evicted.

    Args:
        grace_s: whole seconds that their processes have to end.
    """

    grace_s: int = 20

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    needs_standby: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    needs: ClassVar[tuple[type[Action], ...]] = (MachineDrain,)
    effect: ClassVar[str] = (
        "one machine of the cluster is drained: it takes no pod, and those on it are evicted"
    )
    evidence: ClassVar[str] = _EMPTIED
    stands_for: ClassVar[str] = "upgrades and repairs of machines, one after the other"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = _EMPTIED_IMPACT
    undo: ClassVar[str] = (
        "the cordon is taken off by the process that has put it on, or by its guard"
    )
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable(_lacks_machines)

    @property
    def evidence_s(self) -> float:
        return float(self.grace_s)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_grace_s(self.grace_s)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        return _empty_machine(target, MachineDrain(self.grace_s))


@dataclass(frozen=True, kw_only=True)
class TaintMachine(Fault):
    """Taint the machine of the rank's pod (``NoExecute``).

    The cluster deletes every pod there that does not tolerate the taint. Pods have the grace of
    their own, 30 s unless a template says otherwise.
    """

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    needs_standby: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    needs: ClassVar[tuple[type[Action], ...]] = (MachineTaint,)
    effect: ClassVar[str] = "one machine of the cluster has a taint, for which its pods are deleted"
    evidence: ClassVar[str] = _EMPTIED
    stands_for: ClassVar[str] = (
        "machines that a cloud takes back, or that a controller holds for sick"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = _EMPTIED_IMPACT
    undo: ClassVar[str] = (
        "the taint is taken off by the process that has put it on, or by its guard"
    )
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable(_lacks_machines)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        return _empty_machine(target, MachineTaint())


async def _empty_machine(target: Target, emptying: Action) -> AsyncGenerator[Evidence]:
    """Let the cluster empty the machine of the target's node until the run is over.

    Yield evidence once all pods of the run on the machine have ended. It never comes if a budget
    of disruptions refuses an eviction.
    """
    processes = look_up(target)
    target.struck_nodes = set(target.cluster.together(target.node))
    with target.holding(target.cluster.apply(target.node, emptying)) as emptied:
        yield await pods_over(target, processes, emptied)
        await target.until_end()


@dataclass(frozen=True, kw_only=True)
class StopApiServer(Fault):
    """Stop the API server for a while.

    ``rank`` only names the rank that stops at that moment.

    Args:
        lasts_s: seconds, by the clock of the process that stops it: no message of the run may get
            there meanwhile.
        lever: name of the command.
    """

    rank: int | str = "any"
    lasts_s: float = 10.0
    lever: str = "api-stop"

    family: ClassVar[str] = "control"
    has_one_target: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[tuple[type[Action], ...]] = (ApiServerStop,)
    evidence_s: ClassVar[float] = SERVER_SILENT_S
    cost: ClassVar[Literal["nothing", "process", "node"]] = "nothing"
    effect: ClassVar[str] = (
        "the API server answers nothing: no pod is made, ended or shown, and no record travels"
    )
    evidence: ClassVar[str] = (
        "the API server answered no request of the process that drives the run for 2 s"
    )
    stands_for: ClassVar[str] = "control planes that are overloaded, upgraded or cut off"
    unlisted: ClassVar[str] = CONTROL_UNLISTED
    impact: ClassVar[str] = (
        "none: no decision of a run waits for it; pods that are lost meanwhile are replaced later"
    )
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}
    undo: ClassVar[str] = "the undo of the command, by the process that ran it, or by its guard"
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable(_lacks_levers)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("lasts_s", self.lasts_s, above_0=True)

    def require(self, config: RunConfig) -> None:
        _require_lever(self.lever, machines=False)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # no rank is struck
        with target.holding(
            target.cluster.apply(target.node, ApiServerStop(self.lever, self.lasts_s))
        ) as stop:
            target.release()
            await target.seen(lambda: stop.shown() or None)
            words = f"the API server has not answered within {SERVER_SILENT_S:g} s"
            yield ServerSilent(
                subject=ApiServer(),
                source="requests of the process that drives the run",
                seen=words,
            )
            await target.sleep(self.lasts_s - target.seconds_since)
            stop.shown()  # raises if the command has failed
        target.lifted()
