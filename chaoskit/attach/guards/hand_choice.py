"""The hands by which a fault acts on a job that already runs, from facts of the fault's class.

Nothing is asked of a cluster. A fault that no hand can do is refused with a remedy.

-> ``attach/fault_preview.py`` shows the hands. ``docs/attach.md`` has the table of all faults.
"""

from __future__ import annotations

from typing import Literal

from chaoskit.attach.hands.hand_container import EXEC, NETWORK, PROCESSES, HandMeans
from chaoskit.errors import BadInput
from chaoskit.faults import Bandwidth, Fault, Preempt
from chaoskit.substrate.core.actions import (
    Action,
    BreakDisk,
    CapCpu,
    CapMemory,
    CapPids,
    CapProcessCpu,
    CapProcessMemory,
    CapWrites,
    Freeze,
)
from chaoskit.substrate.core.traffic import Block, Degrade, Narrow, Unplug
from chaoskit.substrate.kubernetes.pods.actions import (
    ApiServerStop,
    ContainerCrash,
    MachineDrain,
    MachineLoss,
    MachineTaint,
    PodDeletion,
    PodEviction,
    PodHindrance,
    PodPreemption,
)

FaultHand = Literal["processes", "exec in the container", "network", "API", "machine"]

API: FaultHand = "API"
MACHINE: FaultHand = "machine"
FAULT_HANDS: tuple[FaultHand, ...] = (PROCESSES, EXEC, NETWORK, API, MACHINE)

#: Actions on a machine, which strike all pods of the job that are on it.
MACHINE_WIDE: frozenset[type[Action]] = frozenset({MachineLoss, MachineDrain, MachineTaint})
_HANDS: dict[type[Action], FaultHand] = {
    Block: NETWORK,
    Narrow: NETWORK,
    CapProcessCpu: PROCESSES,
    ContainerCrash: PROCESSES,
    PodDeletion: API,
    PodEviction: API,
    PodPreemption: API,
    MachineDrain: API,
    MachineTaint: API,
    MachineLoss: MACHINE,
}
#: Further actions of a hand that is in the cgroup of its target.
_HANDS_BY_EXEC: dict[type[Action], FaultHand] = {CapCpu: EXEC}
_BY_IMAGE = HandMeans()
_NO_CGROUP = "no hand may change the cgroup of its target"
#: Remedies for actions that no hand can do.
_REMEDIES: dict[type[Action], str] = {
    CapCpu: "use exec_hands=True, or Straggle(how='quota'): only a hand by exec is in the cgroup of "
    "its target, and may load it",
    Degrade: "use Loss or Bandwidth: no hand can delay packets",
    Unplug: "use Cut: no hand may take down the link of its pod",
    Freeze: "use how='signal', which stops each process: no hand has the kernel's freezer",
    BreakDisk: "run the job by chaoskit: no hand can put a disk below a container that runs",
    CapMemory: f"lower the memory limit of the job's pods: {_NO_CGROUP}",
    CapProcessMemory: f"lower the memory limit of the job's pods: {_NO_CGROUP}",
    CapPids: f"lower the limit of processes of the job's nodes: {_NO_CGROUP}",
    CapWrites: f"run the job by chaoskit: {_NO_CGROUP}",
    PodHindrance: "use DeletePod: new pods are made by the job's controller, not by chaoskit",
    ApiServerStop: "use LoseMachine: other users, and hands themselves, need the API server",
}
_ALTERNATIVES = "use a fault such as Kill, Hang, KillNode, Cut or DeletePod"
_NO_PREEMPT = (
    "use DeletePod(grace_s=...), whose notice comes from the kubelet, or PreemptPod: "
    "the first process of a container may ignore signals of a hand"
)
_NO_WAY = "use per_peer=False: a hand limits all that a pod sends, not a part of it"
_NO_NETWORK = "name an image of hands: a hand by exec has no right to change the pod's network"
#: Actions by which a node that is lost in silence ends, besides the silence itself.
_LOSS: frozenset[type[Action]] = frozenset({ContainerCrash, PodDeletion})


def hand_of(fault: Fault, means: HandMeans = _BY_IMAGE) -> frozenset[FaultHand]:
    """Return the hands that a fault needs.

    Args:
        fault: the fault.
        means: the means by which hands are started. Default: by an image.

    Raises:
        BadInput: if no hand can do it; the remedy names what would make it possible.
    """
    by_action = _HANDS | _HANDS_BY_EXEC if means.by_exec else _HANDS
    for action in fault.needs:
        if action not in by_action and action in _REMEDIES:
            raise BadInput("faults", str(fault), _REMEDIES[action])
        if action not in by_action:
            remedy = f"{_ALTERNATIVES}: no hand carries out {action.__name__}"
            raise BadInput("faults", str(fault), remedy)
    if fault.of_runtime and not strikes_machine(fault):
        remedy = "or run the job by chaoskit: it strikes a part of chaoskit's runtime"
        raise BadInput("faults", str(fault), f"{_ALTERNATIVES}, {remedy}")
    if not fault.from_outside:
        remedy = "or run the job by chaoskit: it acts inside a process, by a hook of chaoskit"
        raise BadInput("faults", str(fault), f"{_ALTERNATIVES}, {remedy}")
    if isinstance(fault, Preempt):
        raise BadInput("faults", str(fault), _NO_PREEMPT)
    if isinstance(fault, Bandwidth) and fault.per_peer:
        raise BadInput("faults", str(fault), _NO_WAY)
    hands = frozenset(by_action[action] for action in actions_of(fault)) or frozenset({PROCESSES})
    if NETWORK in hands and means.by_exec and means.image is None:
        raise BadInput("faults", str(fault), _NO_NETWORK)
    if PROCESSES in hands and means.by_exec:
        hands = hands - {PROCESSES} | {EXEC}
    return hands


def actions_of(fault: Fault) -> frozenset[type[Action]]:
    """Return the kinds of actions by which a fault acts.

    A node whose network is all that a fault needs to end it is lost in silence.
    """
    is_loss = fault.ends_node and fault.needs == (Block,)
    return frozenset(fault.needs) | (_LOSS if is_loss else frozenset())


def strikes_machine(fault: Fault) -> bool:
    """Return True if a fault strikes all pods on the machine of its target."""
    return bool(fault.needs) and MACHINE_WIDE.issuperset(fault.needs)
