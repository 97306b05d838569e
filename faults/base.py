"""What a fault is: its moment and its target, what it does, and how one can see that it took effect.

A fault is a frozen description. The harness waits for its moment and lets it act on a :class:`Target`; the fault then
waits for its evidence. The act and the evidence never come from the same source: a signal was sent, the process *is*
gone.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from random import Random
from typing import Any, ClassVar, Literal, Self, TypeVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, name_remedy
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action
from chaoskit.typed import convert, convert_fields
from chaoskit.vocabulary import LOSS_CAUSES, STRIKE_PHASES, TRIGGER_PHASES
from chaoskit.wire.messages import Trigger

Found = TypeVar("Found")

#: What goes wrong, by the keys that faults use, in the catalogue's order.
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


def require_seconds(field: str, value: float, *, above_0: bool = False) -> None:
    """Refuse what is no duration.

    Raises:
        BadInput: if it is below 0, endless or no number; or 0, where it must be above.
    """
    if not 0 <= value < math.inf or (above_0 and value == 0):
        raise BadInput(
            field, value, f"use a number of seconds{' above 0' if above_0 else ', 0 or more'}"
        )


def require_message(message: str) -> None:
    """Refuse the text of an exception by which that cannot be told from any other.

    Raises:
        BadInput: if there is none.
    """
    if not message.strip():
        raise BadInput("message", message, "use some text: the exception is known by it")


def found(evidence: Found | None) -> Found:
    """What an endless wait has found: it has no other end."""
    assert evidence is not None
    return evidence


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Base of all faults. Exactly one of ``at_step``, ``after_s`` and ``during`` says when.

    Args:
        rank: the rank to hit, in whatever process holds it then; or a role: ``any`` (one rank), ``minority``,
            ``majority``, ``all_but_one``, ``all`` (drawn from the run's seed), ``most_shards``, or ``healer`` (the
            rank from which a joiner is about to take its state).
        at_step: the step during which it strikes, counted from 0. The rank is stopped there until the fault is in.
        phase: ``forward``, ``backward``, ``reduce`` or ``optimizer``: the rank is stopped on entering it.
        after_s: seconds after the first committed step.
        during: a phase of a recovery: ``detection`` (a loss that an earlier fault caused became known), ``regroup``
            (all steps are known, the group is not built), ``restore`` (before the rank takes over state), ``recommit``
            (in the optimizer of its first step in the new membership).
        recovery: which one, for ``during``: the first from the n-th change of membership on (generation n + 1, growth
            counts, too) in which the rank comes to that phase; for ``detection``, the n-th fault that shows as a loss.
    """

    rank: int | str
    at_step: int | None = None
    phase: str = "forward"
    after_s: float | None = None
    during: str | None = None
    recovery: int = 1

    #: Key of :data:`FAMILIES`.
    family: ClassVar[str] = ""
    #: One sentence for the catalogue.
    effect: ClassVar[str] = ""
    #: What makes it effective, for the catalogue.
    evidence: ClassVar[str] = ""
    #: What makes it impactful: how the job feels it.
    impact: ClassVar[str] = "the rank is given up, with the cause"
    #: What jobs are expected to notice of it, by kind of job, where they differ.
    caught: ClassVar[Mapping[str, str]] = {}
    #: Real incidents that it stands for, in words.
    stands_for: ClassVar[str] = ""
    #: The same as rows of published tables, with their shares.
    counted: ClassVar[tuple[IncidentKind, ...]] = ()
    #: Why there is no such row; "" if there is one.
    unlisted: ClassVar[str] = ""
    #: What puts back what it leaves behind.
    undo: ClassVar[str] = "nothing is left behind"
    #: Substrates that can do it.
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns", "docker", "kubernetes")
    #: Arguments of an instance that can be run with the job ``gpt`` on four nodes, on any machine.
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20}
    #: Arguments in which instances differ so much that they can take different moments.
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    #: A line for a test, with the sample for ``{fault}``.
    example: ClassVar[str] = 'chaos.run("gpt", nodes=4, steps=60, faults=[{fault}])'
    #: What it costs at most of what trained from the start: ``nothing``, a ``process``, or a ``node``.
    cost: ClassVar[Literal["nothing", "process", "node"]] = "node"
    #: Fields -> values from which random plans draw it; None: only if :mod:`faults.strategies` has a recipe for it.
    drawn: ClassVar[Mapping[str, Sequence[Any]] | None] = None
    #: Whether its rank has no meaning: each rank that comes to its moment stops there.
    every_rank: ClassVar[bool] = False
    #: Whether it strikes a whole node, so that the loss of each of its workers is its doing.
    whole_node: ClassVar[bool] = False
    #: Whether it takes the node away for good: what ran there is not expected to end well.
    ends_node: ClassVar[bool] = False
    #: Whether a machine is to stand by: for the node that it brings, or for what comes back elsewhere.
    needs_standby: ClassVar[bool] = False
    #: Whether the job must show it: a fault of this kind that took effect, and was not felt, has tried nothing.
    is_felt: ClassVar[bool] = False
    #: Whether no rank may ever be given up for it: then the loss of the one it struck is a false alarm all the same.
    blameless: ClassVar[bool] = False
    #: Whether it strikes what only chaoskit's own runtime has, so that it cannot be done to any other command.
    of_runtime: ClassVar[bool] = False
    #: Whether it strikes the remote tier, so that a proxy of ours must stand before its store.
    of_store: ClassVar[bool] = False

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse arguments that are no fields of the fault, before ``__init__`` raises TypeError without a remedy.

        Raises:
            BadInput: naming the argument and the field that was probably meant.
        """
        names = [item.name for item in fields(cls)]
        if args:
            raise BadInput(cls.__name__, args, f"give each value a name, such as {names[0]}=1")
        for name, value in given.items():
            if name not in names:
                raise BadInput(f"{cls.__name__}.{name}", value, name_remedy(name, names))
        return super().__new__(cls)

    @classmethod
    def unavailable(cls) -> str:
        """Why this machine cannot do it at all; "" if it can do any of its forms."""
        return ""

    @classmethod
    def restricted(cls) -> str:
        """Which of its forms this machine cannot do, and why; "" if it can do them all."""
        return ""

    @property
    def needs(self) -> tuple[type[Action], ...]:
        """What the nodes of a run must let be done to them. The substrate is asked, before anything starts."""
        return ()

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def evidence_s(self) -> float:
        """Seconds that its evidence may need after the act; 0.0 where it comes at once."""
        return 0.0

    @property
    def from_outside(self) -> bool:
        """Whether it can strike without the worker's help. Else the rank must stand at a hook of its main thread."""
        return False

    @property
    def leads_to(self) -> frozenset[str]:
        """Causes of the losses that it explains. For any other one, something else was to blame."""
        return LOSS_CAUSES

    @property
    def must_show(self) -> frozenset[str]:
        """Causes of losses, or of numbers that are found bad, of which one must follow. Empty: a job may bear it."""
        return self.leads_to if self.is_felt else frozenset()

    @property
    def moment(self) -> str:
        """When it strikes, in words."""
        if self.at_step is not None:
            return f"in {self.phase} of step {self.at_step}"
        if self.after_s is not None:
            where = "" if self.from_outside else f", in {self.phase}"
            return f"{self.after_s:g} s after the first committed step{where}"
        if self.during == "detection":
            return f"after detection of loss {self.recovery}"
        return f"in {self.during} of recovery {self.recovery}"

    def __str__(self) -> str:
        shown = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)
            if item.default is MISSING or getattr(self, item.name) != item.default
        ]
        return f"{self.kind}({', '.join(shown)})"

    # -- before the run -------------------------------------------------------------------------------------------

    def validate(self, *, nodes: int, steps: int | None) -> None:
        """Refuse what can never strike.

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
        """Refuse a run in which it would mean nothing.

        Raises:
            BadInput: naming the setting of the run, its value and the remedy.
        """

    def _validate_rank(self, nodes: int) -> None:
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
            raise BadInput("phase", self.phase, "leave it out: during=... says where")

    def expand(self, nodes: int, chance: Random) -> tuple[Self, ...]:
        """One fault a rank, for a role that stands for ranks drawn by ``chance``; else the fault itself."""
        if self.rank not in DRAWN_ROLES:
            return (self,)
        drawn = sorted(chance.sample(range(nodes), DRAWN_ROLES[str(self.rank)](nodes)))
        return tuple(replace(self, rank=rank) for rank in drawn)

    @property
    def place_of_rank(self) -> tuple[int, str]:
        """The rank that it strikes, or -1 and its role."""
        if self.every_rank:
            return -1, ""
        return (-1, self.rank) if isinstance(self.rank, str) else (self.rank, "")

    def trigger(self, fault_id: str) -> Trigger | None:
        """Where a rank stops and waits; None if that cannot be said before the run.

        The judge compares what was struck with the fields of the fault, and never asks this method.
        """
        rank, role = self.place_of_rank
        if self.at_step is not None:
            return Trigger(fault_id, rank, self.at_step, self.phase, role=role)
        if self.during in (None, "detection"):
            return None
        assert self.during is not None
        return Trigger(fault_id, rank, -1, self.during, generation=self.recovery + 1, role=role)

    # -- during the run -------------------------------------------------------------------------------------------

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        """Act, wait for evidence, and put back what must be: an async generator that tells the fault's story.

        What stands before its first ``await`` is done at the exact moment, while the rank waits at its hook, together
        with all that is due there. Each ``yield`` is proof that comes from elsewhere than the act; of several the last
        one counts. What must be put back stands in ``with`` or ``finally``, and is written to ``target.undo`` first: at
        the end of the run the generator is ended where it waits.

        Raises:
            ProcessLookupError: before the first ``yield``, if the target ended by itself meanwhile.
        """
        raise NotImplementedError


#: Fields that say when a fault strikes.
_MOMENT = ("at_step", "phase", "after_s", "during", "recovery")


def typed_faults(faults: object) -> tuple[Fault, ...]:
    """Return faults whose fields have their declared types: the constructors check nothing.

    Raises:
        BadInput: if it is not a list of faults, or naming the field of a fault that is wrong.
    """
    listed: tuple[Fault, ...] = convert("faults", faults, Sequence[Fault])
    return tuple(map(_typed, listed))


def _typed(fault: Fault) -> Fault:
    changed = convert_fields(fault)
    return replace(fault, **changed) if changed else fault


def draw_ranks(faults: Sequence[Fault], nodes: int, seed: int) -> tuple[Fault, ...]:
    """Return the faults of a run, one a rank: roles are drawn from the run's seed and the place of the fault.

    Raises:
        BadInput: if a fault makes something else of itself than its fields say.
    """
    drawn: list[Fault] = []
    for place, fault in enumerate(faults):
        singles = fault.expand(nodes, Random(f"{seed}/{place}"))
        if fault.rank not in DRAWN_ROLES and singles != (fault,):
            made = ", ".join(map(str, singles)) or "nothing"
            remedy = f"have expand() return the fault itself, not {made}: it has a rank already"
            raise BadInput("faults", str(fault), remedy)
        for single in singles:
            if any(getattr(single, name) != getattr(fault, name) for name in _MOMENT):
                raise BadInput(
                    "faults",
                    str(fault),
                    f"have expand() change the rank only, not make it {single}",
                )
        drawn += singles
    return tuple(drawn)
