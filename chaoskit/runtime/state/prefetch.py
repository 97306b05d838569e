"""Batches that are fetched ahead: while a shard is computed, a thread fetches the one that will be asked for next.

What is next is a guess: when a rank is lost, its shards go to other ranks. A batch is a function of its samples alone,
so one that is not asked for is dropped, and the bits of the training are those without the thread.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from chaoskit.errors import BadInput
from chaoskit.process.linux import set_name
from chaoskit.runtime.state.sampling import load


@dataclass(slots=True, eq=False)
class _Request:
    """A batch that is wanted, and what became of it."""

    dataset: Any
    samples: Sequence[int]
    done: threading.Event = field(default_factory=threading.Event)
    dropped: bool = False
    batch: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            if not self.dropped:
                self.batch = load(self.dataset, self.samples)
        except BaseException as error:  # noqa: BLE001 - raised where the batch is asked for
            self.error = error
        self.done.set()


class Prefetcher:
    """Calls datasets on a thread of its own, which begins with the first batch, and nowhere else. One a process.

    So no dataset is called twice at the same time, and what it has opened is used by one thread. The thread is a
    daemon: a dataset that hangs holds up no exit.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[_Request] = SimpleQueue()
        self._ahead: _Request | None = None
        self._runs = False

    def take(self, dataset: Any, samples: Sequence[int]) -> Any:
        """The batch of these samples. Raises what the dataset raised."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.dataset is not dataset or ahead.samples != samples:
            if ahead is not None:
                ahead.dropped = True
            ahead = self._order(dataset, samples)
        ahead.done.wait()
        if ahead.error is not None:
            raise ahead.error
        return ahead.batch

    def expect(self, dataset: Any, samples: Sequence[int]) -> None:
        """These will be asked for next, unless something happens."""
        self._ahead = self._order(dataset, samples)

    def forget(self) -> None:
        """Drop the batch that was fetched ahead. Does not wait."""
        if self._ahead is not None:
            self._ahead.dropped = True
            self._ahead = None

    def _order(self, dataset: Any, samples: Sequence[int]) -> _Request:
        if not self._runs:
            self._runs = True
            threading.Thread(
                target=_serve, args=(self._requests,), name="prefetch", daemon=True
            ).start()
        request = _Request(dataset, samples)
        self._requests.put(request)
        return request


def _serve(requests: SimpleQueue[_Request]) -> None:
    set_name("ck-prefetch")
    while True:
        request = requests.get()
        request.run()
        del request  # an idle thread must not keep a batch


def require_no_draws(fetch: Callable[[], Any]) -> Any:
    """What ``fetch`` gives, if that takes no random numbers from generators of the whole process.

    Raises:
        BadInput: if it does: on another thread it would take them from the model's dropout, at any moment.
    """
    before = generator_states()
    batch = fetch()
    after = generator_states()
    drawn = [name for name, state in before.items() if after[name] != state]
    if drawn:
        remedy = "let dataset[i] draw from a generator of its own, seeded from i: while it is fetched the model draws, too"
        raise BadInput("prefetch", ", ".join(drawn), remedy)
    return batch


def generator_states() -> dict[str, Any]:
    """Return the states of the generators that belong to the whole process, by name."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states
