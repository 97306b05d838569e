"""The objects that an act can reach, and the acts that are left for later moments of the step.

-> step/trainer.py and step/base_trainer.py call the acts that are left. injection/acts.py: the
table of all acts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from chaoskit.checkpoint.disk.breakpoints import Breakpoints
from chaoskit.errors import ChaoskitError
from chaoskit.runtime.group.collective import CollectiveGroup
from chaoskit.runtime.state.registered import Registered

Report = Callable[[bool, str], None]
Fetch = Callable[[], Any]


@dataclass(slots=True)
class InjectedActs:
    """The acts that are left in a worker for later.

    In a run without faults they are empty lists, and cost almost nothing.

    Each act may remove itself from its list.

    Attributes:
        on_phase: called with phase and step when a phase is entered, before it begins.
        around_fetch: called with the fetch of a batch, step and shard; returns the function to call
            in its place.
        on_loss: called with the loss before its backward pass; returns the loss to use.
        on_reduction: called with the process group before this rank takes part in a reduction.
        on_received: called with the reduced gradients, one a trained parameter, before they are
            read.
        breakpoints: the places at which the threads that copy the state stop.
        on_updated: called when the optimizers have run, before the new state is read or copied.
    """

    on_phase: list[Callable[[str, int], None]] = field(default_factory=list)
    around_fetch: list[Callable[[Fetch, int, int], Fetch]] = field(default_factory=list)
    on_loss: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    on_reduction: list[Callable[[CollectiveGroup], None]] = field(default_factory=list)
    on_received: list[Callable[[list[Tensor]], None]] = field(default_factory=list)
    breakpoints: Breakpoints = field(default_factory=Breakpoints)
    on_updated: list[Callable[[], None]] = field(default_factory=list)

    def enter(self, phase: str, step: int) -> None:
        """Call the acts for a phase that the training thread enters."""
        for act in list(self.on_phase):
            act(phase, step)

    def fetch(self, fetch: Fetch, step: int, shard: int) -> Any:
        """Return the batch of a shard, fetched through the acts for it."""
        for wrap in list(self.around_fetch):
            fetch = wrap(fetch, step, shard)
        return fetch()

    def loss(self, loss: Tensor) -> Tensor:
        """Return the loss with which the backward pass begins, changed by the acts for it."""
        for act in list(self.on_loss):
            loss = act(loss)
        return loss

    def before_reduction(self, group: CollectiveGroup) -> None:
        """Call the acts before this rank sends its gradients.

        Raise GroupFailed if the group is left meanwhile.
        """
        for act in list(self.on_reduction):
            act(group)

    def received(self, gradients: list[Tensor]) -> None:
        """Call the acts for reduced gradients. They may change the gradients in place."""
        for act in list(self.on_received):
            act(gradients)

    def updated(self) -> None:
        """Call the acts after the optimizers have run. They may change the state."""
        for act in list(self.on_updated):
            act()


@dataclass(frozen=True, slots=True)
class InjectionContext:
    """The state, the moment, the later acts and the report of an act.

    ``report(effective, observed)`` may be called from any thread.

    Attributes:
        state: the state that an act may change; None in a worker that has not begun to train, and
            outside the main thread.
        report: called with whether the act had its effect, and what was observed, in words.
        phase: the phase in which the act was ordered.
        step: the step that is attempted; -1 before the first.
    """

    state: Registered | None
    injected: InjectedActs
    report: Report
    phase: str
    step: int

    @property
    def replica(self) -> Registered:
        """The state of the worker. Raises ChaoskitError in a worker that has not begun to train."""
        if self.state is None:
            raise ChaoskitError("this act needs a worker that trains")
        return self.state
