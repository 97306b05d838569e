"""Prefetching of batches: while a shard is computed, a thread fetches the batch of the next one.

The next shard is a guess: when a rank is lost, its shards go to other ranks. A batch is a function
of its samples. One that is not needed is dropped, and the bits of the training are the same as
without the thread.

-> step/trainer.py (``_samples_ahead``): the guess. state/sampling.py: how a batch is collated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from chaoskit.errors import BadInput
from chaoskit.process.linux import set_name
from chaoskit.runtime.state.sampling import DRAW_TRIALS, drawn_generators, load


@dataclass(slots=True, eq=False)
class _BatchRequest:
    """A requested batch, and its result."""

    dataset: Any
    samples: Sequence[int]
    done: threading.Event = field(default_factory=threading.Event)
    dropped: bool = False
    batch: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Fetch the batch unless it was dropped, and keep it or the exception."""
        try:
            if not self.dropped:
                self.batch = load(self.dataset, self.samples)
        except BaseException as error:  # noqa: BLE001 - raised in Prefetcher.take
            self.error = error
        self.done.set()


class Prefetcher:
    """A thread that calls datasets. It begins with the first batch. A process has one.

    As no other thread calls datasets, a dataset is never called twice at the same time, and its
    files are used by one thread. The thread is a daemon: a dataset that hangs does not delay the
    exit.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[_BatchRequest] = SimpleQueue()
        self._expected: _BatchRequest | None = None
        self._has_thread = False

    def take(self, dataset: Any, samples: Sequence[int]) -> Any:
        """Wait for the batch of these samples and return it. Raise what the dataset raised.

        The batch is the one that :meth:`expect` began if it has the same samples. Otherwise that
        batch is dropped, and this one is fetched.
        """
        request, self._expected = self._expected, None
        if request is None or request.dataset is not dataset or request.samples != samples:
            if request is not None:
                request.dropped = True
            request = self._request(dataset, samples)
        request.done.wait()
        if request.error is not None:
            raise request.error
        return request.batch

    def expect(self, dataset: Any, samples: Sequence[int]) -> None:
        """Start to fetch samples that will probably be needed next, and return at once.

        A batch of an earlier call that was not taken is forgotten. An exception of the dataset is
        raised by :meth:`take`.
        """
        self._expected = self._request(dataset, samples)

    def forget(self) -> None:
        """Drop the batch that is fetched ahead. Does not wait for the thread."""
        if self._expected is not None:
            self._expected.dropped = True
            self._expected = None

    def _request(self, dataset: Any, samples: Sequence[int]) -> _BatchRequest:
        """Return a new request, which the thread serves after all earlier ones."""
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(
                target=_serve, args=(self._requests,), name="prefetch", daemon=True
            ).start()
        request = _BatchRequest(dataset, samples)
        self._requests.put(request)
        return request


def _serve(requests: SimpleQueue[_BatchRequest]) -> None:
    """Serve requests in turn. Does not return."""
    set_name("ck-prefetch")
    while True:
        request = requests.get()
        request.run()
        del request  # an idle thread must not keep a batch


def require_no_draws(fetch: Callable[[], Any]) -> Any:
    """Return the result of ``fetch``, which must not draw from generators of the whole process.

    It is called again if numbers were drawn, which another thread may have done.

    Raises:
        BadInput: if it draws. On another thread its draws would disturb the model's dropout, at any
            moment.
    """
    batches: list[Any] = []
    for _ in range(DRAW_TRIALS):
        drawn_names = drawn_generators(lambda: batches.append(fetch()))
        if not drawn_names:
            return batches[-1]
    remedy = (
        "let dataset[i] draw from a generator of its own, seeded from i: the model draws from "
        "the global generators at the same time"
    )
    raise BadInput("prefetch", ", ".join(drawn_names), remedy)
