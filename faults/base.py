"""Base class of all faults, and the functions that type and expand the faults of a run.

A fault is a frozen description: its moment, its target, what it does, and the evidence that it took
effect. The harness waits for the moment and lets the fault act on a :class:`Target`; the fault then
waits for its evidence. The act and the evidence never come from the same source: a signal was sent,
the process *is* gone.

-> experiment/injection/job_follower.py: when a fault is due, and which process has its rank then;
injector.py runs ``inject`` and records the evidence.
-> experiment/injection/roster.py: which process has a role such as ``most_shards`` at that moment.
-> experiment/judge/fault_audit.py: the check that a fault struck its planned target.
-> substrate/undo/guard.py: the undo of a fault whose run was killed.
-> processes/kill.py is a short example of a fault.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from random import Random
from typing import Any, ClassVar, Literal, Self

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, name_remedy
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action
from chaoskit.typed import convert, convert_fields
from chaoskit.vocabulary import LOSS_CAUSES, STRIKE_PHASES, TRIGGER_PHASES
from chaoskit.wire.messages import Trigger

#: Headings of the families of faults, by the keys that faults use, in the catalogue's order.
FAMILIES = {
    "process": "A process ends",
    "standstill": "A process stands still",
    "time": "Time goes wrong",
    "numbers": "Numbers go wrong",
    "node": "A node goes wrong",
    "network": "The network goes wrong",
    "disk": "A disk goes wrong",
    "checkpoint": "A checkpoint goes wrong",
    "control": "The control plane goes wrong",
    "elastic": "The world changes its size",
}

#: Roles that are drawn when a run is planned, with the number of ranks that they stand for.
DRAWN_ROLES: dict[str, Callable[[int], int]] = {
    "any": lambda nodes: 1,
    "minority": lambda nodes: (nodes - 1) // 2,
    "majority": lambda nodes: nodes // 2 + 1,
    "all_but_one": lambda nodes: nodes - 1,
    "all": lambda nodes: nodes,
}
#: Roles that are known only at the moment itself.
LIVE_ROLES = ("most_shards", "healer")


def fault_id(number: int) -> str:
    """Return the name of a fault in messages and journals, such as ``fault0`` for the first."""
    return f"fault{number}"


def require_seconds(field: str, value: float, *, above_0: bool = False) -> None:
    """Raise BadInput unless ``value`` is a duration in seconds.

    Raises:
        BadInput: if it is below 0, infinite or NaN; or 0, where ``above_0`` is set.
    """
    if not 0 <= value < math.inf or (above_0 and value == 0):
        raise BadInput(
            field, value, f"use a number of seconds{' above 0' if above_0 else ', 0 or more'}"
        )


def require_message(message: str) -> None:
    """Raise BadInput unless ``message`` identifies an exception.

    Raises:
        BadInput: if it is empty or blank.
    """
    if not message.strip():
        raise BadInput("message", message, "use some text: the exception is known by it")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Base of all faults. Exactly one of ``at_step``, ``after_s`` and ``during`` gives the moment.

    Exactly one of ``rank`` and ``node`` gives the target.

    Args:
        rank: the rank to hit, in whatever process holds it then; or a role: ``any`` (one rank),
            ``minority``, ``majority``, ``all_but_one``, ``all`` (drawn from the run's seed),
            ``most_shards``, or ``healer`` (the rank from which a joiner is about to take its
            state).
        node: the name of a node in a job that runs already, for a fault of a whole node or of its
            traffic: it needs no rank.
        at_step: the step during which it strikes, counted from 0. The rank is stopped there until
            the fault is in.
        phase: ``forward``, ``backward``, ``reduce`` or ``optimizer``: the rank is stopped on
            entering it.
        after_s: seconds after the first committed step.
        during: a phase of a recovery: ``detection`` (a loss that an earlier fault caused became
            known), ``regroup`` (all steps are known, the group is not built), ``restore`` (before
            the rank takes over state), ``recommit`` (in the optimizer of its first step in the new
            membership).
        recovery: which one, for ``during``: the first from the n-th change of membership on
            (generation n + 1, growth counts, too) in which the rank comes to that phase; for
            ``detection``, the n-th fault that shows as a loss.
    """

    rank: int | str = ""
    node: str = ""
    at_step: int | None = None
    phase: str = "forward"
    after_s: float | None = None
    during: str | None = None
    recovery: int = 1

    #: Key of :data:`FAMILIES`.
    family: ClassVar[str] = ""
    #: One sentence for the catalogue.
    effect: ClassVar[str] = ""
    #: Description of the evidence that it took effect, for the catalogue.
    evidence: ClassVar[str] = ""
    #: Description of its impact on the job, for the catalogue.
    impact: ClassVar[str] = "the rank is given up, with the cause"
    #: Kind of job -> the damage that such a job is expected to detect, where kinds differ.
    caught: ClassVar[Mapping[str, str]] = {}
    #: Description of the real incidents that it stands for.
    stands_for: ClassVar[str] = ""
    #: Rows of published tables that count these incidents, with their shares.
    counted: ClassVar[tuple[IncidentKind, ...]] = ()
    #: Reason why no table has such a row; "" if one has.
    unlisted: ClassVar[str] = ""
    #: Description of how its effects are undone, for the catalogue.
    undo: ClassVar[str] = "nothing is left behind"
    #: Substrates on which it can be injected.
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns", "docker", "kubernetes")
    #: Arguments of a sample instance, which runs with the job ``gpt`` on four nodes, on any
    #: machine.
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20}
    #: Arguments in which instances differ so much that they can take different moments.
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    #: A line for a test, with the sample for ``{fault}``.
    example: ClassVar[str] = 'chaos.run("gpt", nodes=4, steps=60, faults=[{fault}])'
    #: Largest part of the first world that it costs: ``nothing``, a ``process``, or a ``node``.
    cost: ClassVar[Literal["nothing", "process", "node"]] = "node"
    #: Fields -> values from which random plans draw it; None: only if :mod:`faults.strategies` has
    #: a recipe for it.
    drawn: ClassVar[Mapping[str, Sequence[Any]] | None] = None
    #: True if its rank has no meaning: each rank that comes to its moment stops there.
    every_rank: ClassVar[bool] = False
    #: True if its target exists once, such as the coordinator: any role gives a single fault.
    has_one_target: ClassVar[bool] = False
    #: True if it ends the coordinator.
    ends_coordinator: ClassVar[bool] = False
    #: True if it strikes a whole node, so that it explains the loss of each worker of the node.
    whole_node: ClassVar[bool] = False
    #: True if it removes the node for good: the processes of the node are not expected to end well.
    ends_node: ClassVar[bool] = False
    #: True if it needs a standby machine: for the node that it adds, or for a node that moves.
    needs_standby: ClassVar[bool] = False
    #: True if the job must show an impact: a fault that took effect but was not felt tests nothing.
    is_felt: ClassVar[bool] = False
    #: True if no rank may be given up for it: the loss of a rank that it struck is a false alarm.
    blameless: ClassVar[bool] = False
    #: True if it strikes a part of chaoskit's own runtime, so that other commands cannot have it.
    of_runtime: ClassVar[bool] = False
    #: True if it strikes the remote tier, so that the run needs chaoskit's proxy before its store.
    of_store: ClassVar[bool] = False

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse arguments that are no fields of the fault, with a remedy.

        ``__init__`` would raise a TypeError without one.

        Raises:
            BadInput: naming the argument and the field that was probably meant.
        """
        names = [declared.name for declared in fields(cls)]
        if args:
            raise BadInput(cls.__name__, args, f"give each value a name, such as {names[0]}=1")
        for name, value in given.items():
            if name not in names:
                raise BadInput(f"{cls.__name__}.{name}", value, name_remedy(name, names))
        return super().__new__(cls)

    @classmethod
    def unavailable(cls) -> str:
        """Return the reason why this machine cannot inject any form of it; "" if it can."""
        return ""

    @classmethod
    def restricted(cls) -> str:
        """Return the forms of it that this machine cannot inject, and why; "" for none."""
        return ""

    # A subclass overrides a property by a class attribute where all its instances have one value.

    @property
    def needs(self) -> tuple[type[Action], ...]:
        """The actions that it applies to nodes.

        The substrate is asked for them before anything starts.
        """
        return ()

    @property
    def kind(self) -> str:
        """The name of its class, by which plans and reports call it."""
        return type(self).__name__

    @property
    def evidence_s(self) -> float:
        """The seconds that its evidence may take after the act; 0.0 if it comes at once.

        Without evidence, a run that ends earlier is reported as too short.
        """
        return 0.0

    @property
    def from_outside(self) -> bool:
        """True if it strikes without the worker's help.

        Otherwise the rank must stop at a hook of its main thread first.
        """
        return False

    @property
    def leads_to(self) -> frozenset[str]:
        """The causes of the losses that it explains.

        A loss with any other cause has another reason.
        """
        return LOSS_CAUSES

    @property
    def must_show(self) -> frozenset[str]:
        """The causes of losses, or of bad numbers, of which at least one must follow.

        It is empty if a job may survive the fault without any.
        """
        return self.leads_to if self.is_felt else frozenset()

    @property
    def moment(self) -> str:
        """The moment at which it strikes, in words."""
        if self.at_step is not None:
            return f"in {self.phase} of step {self.at_step}"
        if self.after_s is not None:
            where = "" if self.from_outside else f", in {self.phase}"
            return f"{self.after_s:g} s after the first committed step{where}"
        if self.during == "detection":
            return f"after detection of loss {self.recovery}"
        return f"in {self.during} of recovery {self.recovery}"

    @property
    def place(self) -> str:
        """The rank, the role or the node that it names, in words."""
        return f"node {self.node}" if self.node else f"rank {self.rank}"

    def __str__(self) -> str:
        shown = [
            f"{declared.name}={getattr(self, declared.name)!r}"
            for declared in fields(self)
            if declared.default is MISSING or getattr(self, declared.name) != declared.default
        ]
        return f"{self.kind}({', '.join(shown)})"

    # -- before the run ----------------------------------------------------------------------------

    def validate(self, *, nodes: int, steps: int | None) -> None:
        """Raise BadInput if the fault can never strike in such a run.

        Args:
            nodes: number of nodes, with one rank each.
            steps: number of steps; None if it is not known before the run.

        Raises:
            BadInput: naming the field, its value and the remedy.
        """
        self._validate_rank(nodes)
        given = [
            name for name in ("at_step", "after_s", "during") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise BadInput(
                "at_step", self.at_step, "give exactly one of at_step, after_s and during"
            )
        if self.at_step is not None and (
            self.at_step < 0 or (steps is not None and self.at_step >= steps)
        ):
            last = "" if steps is None else f" to {steps - 1}"
            raise BadInput("at_step", self.at_step, f"use a step from 0{last}")
        if self.phase not in TRIGGER_PHASES:
            raise BadInput("phase", self.phase, f"use one of {', '.join(TRIGGER_PHASES)}")
        if self.after_s is not None:
            require_seconds("after_s", self.after_s)
        self._validate_recovery()

    def require(self, config: RunConfig) -> None:
        """Raise BadInput if the settings of the run leave the fault without any effect.

        Raises:
            BadInput: naming the setting of the run, its value and the remedy.
        """

    def _validate_rank(self, nodes: int) -> None:
        """Raise BadInput unless the rank or the role selects a rank of such a run."""
        if self.node:
            remedy = "name a rank: node= is for jobs that run already (chaos.attach)"
            raise BadInput("node", self.node, remedy)
        if not isinstance(self.rank, str):
            if not 0 <= self.rank < nodes:
                raise BadInput(
                    "rank",
                    self.rank,
                    f"use a rank from 0 to {nodes - 1}: the run has {nodes} nodes",
                )
            return
        if self.rank not in (*DRAWN_ROLES, *LIVE_ROLES):
            raise BadInput(
                "rank", self.rank, f"use a rank, or one of {', '.join((*DRAWN_ROLES, *LIVE_ROLES))}"
            )
        if self.rank in DRAWN_ROLES and DRAWN_ROLES[self.rank](nodes) == 0:
            raise BadInput("rank", self.rank, f"use another role: of {nodes} ranks it selects none")
        if self.rank == "healer" and (self.during != "restore" or not self.from_outside):
            remedy = "strike it from outside, as Kill does, with during='restore': there is no healer at another time"
            raise BadInput("rank", self.rank, remedy)

    def _validate_recovery(self) -> None:
        """Raise BadInput unless the fault can strike in the phase of a recovery that it names."""
        if self.during is None:
            if self.recovery != 1:
                raise BadInput("recovery", self.recovery, "use it with during=... only")
            return
        if self.during not in STRIKE_PHASES:
            raise BadInput("during", self.during, f"use one of {', '.join(STRIKE_PHASES)}")
        if not self.from_outside and self.during in ("detection", "regroup"):
            remedy = f"use 'restore' or 'recommit': {self.kind} needs the rank's main thread"
            raise BadInput("during", self.during, remedy)
        if self.recovery < 1:
            raise BadInput("recovery", self.recovery, "use 1 or more")
        if self.phase != "forward":
            raise BadInput("phase", self.phase, "leave it out: during=... names the phase")

    def expand(self, nodes: int, chance: Random) -> tuple[Self, ...]:
        """Return one fault for each rank of a drawn role, in the order of the ranks.

        A fault with a number or a live role is returned itself. A fault with a single target
        strikes the lowest of the drawn ranks only.

        Args:
            nodes: number of ranks to draw from.
            chance: draws the ranks.
        """
        if self.rank not in DRAWN_ROLES:
            return (self,)
        drawn = sorted(chance.sample(range(nodes), DRAWN_ROLES[str(self.rank)](nodes)))
        if self.has_one_target:
            drawn = drawn[:1]
        return tuple(replace(self, rank=rank) for rank in drawn)

    @property
    def place_of_rank(self) -> tuple[int, str]:
        """The number of the rank that it strikes and "", or -1 and its role.

        A fault of every rank has -1 and "".
        """
        if self.every_rank:
            return -1, ""
        return (-1, self.rank) if isinstance(self.rank, str) else (self.rank, "")

    def trigger(self, fault_id: str) -> Trigger | None:
        """Return the hook at which a rank stops and waits; None if the run decides that later.

        It decides later on a fault at a time or after the detection of a loss. The judge compares
        what was struck with the fields of the fault, and never calls this method.
        """
        rank, role = self.place_of_rank
        if self.at_step is not None:
            return Trigger(fault_id, rank, self.at_step, self.phase, role=role)
        if self.during is None or self.during == "detection":
            return None
        return Trigger(fault_id, rank, -1, self.during, generation=self.recovery + 1, role=role)

    # -- during the run ----------------------------------------------------------------------------

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        """Act, wait for evidence, and undo the act: an async generator with the whole story.

        The statements before its first ``await`` run at the exact moment, while the rank waits at
        its hook, together with those of all faults that are due there. Each ``yield`` gives
        evidence from another source than the act; the last one counts. The undo stands in ``with``
        or ``finally``, and is written to ``target.undo`` before the act. The end of the run closes
        the generator where it waits. A rank that still waits when it ends is released.

        Raises:
            ProcessLookupError: before the first ``yield``, if the target has ended by itself. The
                fault is then missed, and the run goes on.
            BadInput, HarnessError: if it cannot act. The run ends with this error; any other error
                ends it as :class:`chaoskit.errors.FaultBroken`.
        """
        raise NotImplementedError


#: Fields that make up the moment of a fault.
_MOMENT_FIELDS = ("at_step", "phase", "after_s", "during", "recovery")


def typed_faults(faults: object) -> tuple[Fault, ...]:
    """Return ``faults`` with fields of the declared types, which the constructors do not check.

    Raises:
        BadInput: if it is not a list of faults, or naming the field of a fault that is wrong.
    """
    listed: tuple[Fault, ...] = convert("faults", faults, Sequence[Fault])
    return tuple(map(_typed, listed))


def _typed(fault: Fault) -> Fault:
    changed = convert_fields(fault)
    return replace(fault, **changed) if changed else fault


def draw_ranks(faults: Sequence[Fault], nodes: int, seed: int) -> tuple[Fault, ...]:
    """Return the faults of a run, one for each rank that is struck.

    Ranks of roles are drawn from the run's seed and the position of the fault in ``faults``.

    Raises:
        BadInput: if ``expand`` of a fault changes more than its rank.
    """
    drawn: list[Fault] = []
    for position, fault in enumerate(faults):
        expanded = fault.expand(nodes, Random(f"{seed}/{position}"))
        if fault.rank not in DRAWN_ROLES and expanded != (fault,):
            result = ", ".join(map(str, expanded)) or "nothing"
            remedy = f"have expand() return the fault itself, not {result}: it has a rank already"
            raise BadInput("faults", str(fault), remedy)
        for single in expanded:
            if any(getattr(single, name) != getattr(fault, name) for name in _MOMENT_FIELDS):
                raise BadInput(
                    "faults",
                    str(fault),
                    f"have expand() change the rank only, not make it {single}",
                )
        drawn += expanded
    return tuple(drawn)
