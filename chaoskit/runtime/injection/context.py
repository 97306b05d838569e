"""What an act can reach, and where it leaves what must happen at a later moment of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from chaoskit.checkpoint.disk.breakpoints import Breakpoints
from chaoskit.errors import ChaoskitError
from chaoskit.runtime.group.collective import Group
from chaoskit.runtime.state.registered import Registered

Report = Callable[[bool, str], None]
Fetch = Callable[[], Any]


@dataclass(slots=True)
class InjectedActs:
    """Acts that acts have left in a worker. Empty lists, and next to no cost, in a run without faults.

    Each act may remove itself from its list.

    Attributes:
        on_phase: called with phase and step on entering a phase, before it begins.
        around_fetch: called with the fetch of a batch, step and shard; gives what is to be done in its place.
        on_loss: the loss before its backward pass -> the loss to use.
        on_reduction: called with the process group before this rank takes part in a reduction.
        on_received: called with the reduced gradients, one a trained parameter, before anybody has read them.
        breakpoints: at which the threads that copy the state stop.
        on_updated: called when the optimizers have run, before anybody reads or copies the new state.
    """

    on_phase: list[Callable[[str, int], None]] = field(default_factory=list)
    around_fetch: list[Callable[[Fetch, int, int], Fetch]] = field(default_factory=list)
    on_loss: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    on_reduction: list[Callable[[Group], None]] = field(default_factory=list)
    on_received: list[Callable[[list[Tensor]], None]] = field(default_factory=list)
    breakpoints: Breakpoints = field(default_factory=Breakpoints)
    on_updated: list[Callable[[], None]] = field(default_factory=list)

    def enter(self, phase: str, step: int) -> None:
        """The training thread enters a phase."""
        for act in list(self.on_phase):
            act(phase, step)

    def fetch(self, fetch: Fetch, step: int, shard: int) -> Any:
        """The batch of a shard."""
        for wrap in list(self.around_fetch):
            fetch = wrap(fetch, step, shard)
        return fetch()

    def loss(self, loss: Tensor) -> Tensor:
        """The loss that the backward pass begins with."""
        for act in list(self.on_loss):
            loss = act(loss)
        return loss

    def before_reduction(self, group: Group) -> None:
        """This rank is about to send its gradients. Raises GroupFailed when the group is left meanwhile."""
        for act in list(self.on_reduction):
            act(group)

    def received(self, gradients: list[Tensor]) -> None:
        """The reduction is over."""
        for act in list(self.on_received):
            act(gradients)

    def updated(self) -> None:
        """The optimizers have run."""
        for act in list(self.on_updated):
            act()


@dataclass(frozen=True, slots=True)
class InjectionContext:
    """Where an act works: the replica of its worker, the moment, the injected, and the way to tell what was seen.

    ``report(effective, observed)`` may be called from any thread.
    """

    live: Registered | None
    injected: InjectedActs
    report: Report
    phase: str
    step: int

    @property
    def replica(self) -> Registered:
        """Raises ChaoskitError in a worker that has not begun to train."""
        if self.live is None:
            raise ChaoskitError("this act needs a worker that trains")
        return self.live
