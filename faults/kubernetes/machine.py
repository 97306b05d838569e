"""The machine below a pod that goes, and the API server: broken from outside, by a command of the user's."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import found, require_seconds
from chaoskit.faults.evidence import ApiServer, Evidence, MachineSilent, ServerSilent
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.kubernetes.pod import EXAMPLE, pods_over, pods_unavailable, require_grace_s
from chaoskit.faults.nodes.coordinator import ControlFault
from chaoskit.faults.nodes.node import NodeFault
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

_STANDS_S = 0.3  # a rank waits so long for the command: others would take it for hung


def _options() -> KubernetesOptions:
    return KubernetesOptions.from_environment(os.environ)


def _lacks_machines(options: KubernetesOptions) -> str:
    if options.driven is None and not options.has_driver and in_a_pod() and not options.own_machine:
        return f"say on which machine pytest runs, which is not broken: {VARIABLE}OWN_MACHINE=NAME"
    if not options.breakable:
        return f"name the machines that may be broken: {VARIABLE}MACHINES=worker-7,worker-8"
    return ""


def _lacks_levers(options: KubernetesOptions) -> str:
    """What drives a run in a pod knows no levers, and need not."""
    if options.driven is None and not options.levers:
        return (
            f"name a file with the commands that break them, and their undo: {VARIABLE}LEVERS=FILE"
        )
    return ""


def _require_lever(name: str, *, machines: bool) -> None:
    options = _options()
    if options.driven is not None or not options.levers:
        return
    known = machine_commands.read(options.levers)
    fitting = [one for one, lever in known.items() if lever.is_for_machines is machines]
    if name not in fitting:
        kind = "with {machine} in its words" if machines else "without {machine}"
        raise BadInput(
            "lever",
            name,
            f"use one of {options.levers} {kind}: {', '.join(fitting) or 'there is none'}",
        )


@dataclass(frozen=True, kw_only=True)
class LoseMachine(NodeFault):
    """Have the machine of the rank's pod go, with all pods of the run on it, by a command such as a power cut.

    Args:
        lever: name of the command.
        back_after_s: when its undo runs; None for the end of the run.
    """

    lever: str = "power-cut"
    back_after_s: float | None = None

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    needs_standby: ClassVar[bool] = True
    effect: ClassVar[str] = (
        "one machine of the cluster is gone in silence, with every pod that is on it"
    )
    evidence: ClassVar[str] = (
        "the command ended well, and no supervisor of the run on that machine answers any more"
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

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (MachineLoss,)

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {"unreachable"}

    @property
    def evidence_s(self) -> float:
        return ANSWER_S

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
            found(await target.seen(lambda: machine.shown() == 2 or None))
            told = f"the machine of {', '.join(lost)} does not answer, nor does any other supervisor of the run there"
            yield MachineSilent(
                subject=target.whole_node, source="the streams to the supervisors there", seen=told
            )
            if self.back_after_s is None:
                await target.until_end()
            else:
                await target.sleep(self.back_after_s - target.seconds_since)
        target.lifted()


@dataclass(frozen=True, kw_only=True)
class EmptiedMachine(NodeFault):
    """Base of the faults that have a machine emptied by the cluster, and given back when the run is over."""

    family: ClassVar[str] = "node"
    of_runtime: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    needs_standby: ClassVar[bool] = True
    evidence: ClassVar[str] = (
        "the connections to the first processes of all pods of the run on the machine have ended, and the API server "
        "has none of them any more, or says that they have ended"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = (
        "the nodes on it are given up; with grace and an elastic policy they leave"
    )
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable(_lacks_machines)

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (type(self.emptying),)

    @property
    def emptying(self) -> Action:
        """What is done to the machine."""
        raise NotImplementedError

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {"unreachable"}

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        target.struck_nodes = set(target.cluster.together(target.node))
        with target.holding(target.cluster.apply(target.node, self.emptying)) as emptied:
            yield await pods_over(target, processes, emptied)
            await target.until_end()


@dataclass(frozen=True, kw_only=True)
class DrainMachine(EmptiedMachine):
    """Drain the machine of the rank's pod, as ``kubectl drain`` does: cordon it, then evict the pods of the run there.

    Args:
        grace_s: their processes have so many whole seconds to end.
    """

    grace_s: int = 20

    effect: ClassVar[str] = (
        "one machine of the cluster is drained: it takes no pod, and those on it are evicted"
    )
    stands_for: ClassVar[str] = "upgrades and repairs of machines, one after the other"
    undo: ClassVar[str] = (
        "the cordon is taken off by the process that has put it on, or by its guard"
    )

    @property
    def emptying(self) -> Action:
        return MachineDrain(self.grace_s)

    @property
    def evidence_s(self) -> float:
        return float(self.grace_s)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_grace_s(self.grace_s)


@dataclass(frozen=True, kw_only=True)
class TaintMachine(EmptiedMachine):
    """Taint the machine of the rank's pod (``NoExecute``): the cluster deletes every pod there that does not bear it.

    Pods have the grace of their own, 30 s unless a template says otherwise.
    """

    effect: ClassVar[str] = "one machine of the cluster has a taint, for which its pods are deleted"
    stands_for: ClassVar[str] = (
        "machines that a cloud takes back, or that a controller holds for sick"
    )
    undo: ClassVar[str] = (
        "the taint is taken off by the process that has put it on, or by its guard"
    )

    @property
    def emptying(self) -> Action:
        return MachineTaint()


@dataclass(frozen=True, kw_only=True)
class StopApiServer(ControlFault):
    """Have the API server stop for a while. ``rank`` only says which rank stands at the moment when that happens.

    Args:
        lasts_s: so long, by the clock of the process that stops it: no word of the run may get there meanwhile.
        lever: name of the command.
    """

    lasts_s: float = 10.0
    lever: str = "api-stop"

    effect: ClassVar[str] = (
        "the API server answers nothing: no pod is made, ended or shown, and no record travels"
    )
    evidence: ClassVar[str] = (
        "the API server said nothing for 2 s that it was asked by what drives the run"
    )
    stands_for: ClassVar[str] = "control planes that are overloaded, upgraded or cut off"
    impact: ClassVar[str] = (
        "none: no decision of a run waits for it; pods that are lost meanwhile are replaced later"
    )
    undo: ClassVar[str] = "the undo of the command, by the process that ran it, or by its guard"
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable(_lacks_levers)

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (ApiServerStop,)

    @property
    def evidence_s(self) -> float:
        return SERVER_SILENT_S

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("lasts_s", self.lasts_s, above_0=True)

    def require(self, config: RunConfig) -> None:
        _require_lever(self.lever, machines=False)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # no rank comes to harm
        with target.holding(
            target.cluster.apply(target.node, ApiServerStop(self.lever, self.lasts_s))
        ) as stop:
            target.release()
            found(await target.seen(lambda: stop.shown() or None))
            told = f"the API server has not answered within {SERVER_SILENT_S:g} s"
            yield ServerSilent(
                subject=ApiServer(), source="requests of what drives the run", seen=told
            )
            await target.sleep(self.lasts_s - target.seconds_since)
            stop.shown()  # raises where the command has failed
        target.lifted()
