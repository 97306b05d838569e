"""Fetching batches ahead hides their time, and changes nothing else."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.waiting import LIMIT_S, wait_until
from torch import Tensor

from chaoskit.errors import BadInput
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.state.prefetch import Prefetcher, require_no_draws
from chaoskit.vocabulary import Event
from faults import BadBatch, DataStall, Kill

JOBS = Path(__file__).parents[2] / "jobs" / "training" / "fetching.py"


# -- the thread ------------------------------------------------------------------------------------


class Slow:
    """A dataset in which each batch waits for the gate."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.threads: set[int] = set()
        self.gate = threading.Semaphore(0)

    def __getitems__(self, indices: list[int]) -> Tensor:
        self.begun.append(indices)
        self.threads.add(threading.get_ident())
        assert self.gate.acquire(timeout=LIMIT_S)
        if -1 in indices:
            raise OSError("sample -1 cannot be read")
        return torch.tensor(indices)


@pytest.fixture
def prefetcher() -> Prefetcher:
    return Prefetcher()


def test_what_is_expected_is_fetched_meanwhile(prefetcher: Prefetcher) -> None:
    """Announcing the next batch takes no time, and the batch is there when it is asked for."""
    data = Slow()
    prefetcher.expect(data, [1, 2])
    wait_until(lambda: data.begun, "the fetch")
    data.gate.release()
    assert prefetcher.take(data, [1, 2]).tolist() == [1, 2]
    assert data.begun == [[1, 2]]


def test_a_wrong_guess_is_dropped(prefetcher: Prefetcher) -> None:
    """A fetch that has begun is waited for, so that no dataset is called twice at once; its error
    is not raised.
    """
    data, other = Slow(), Slow()
    prefetcher.expect(data, [-1])
    wait_until(lambda: data.begun, "the fetch")
    data.gate.release()
    other.gate.release()
    assert prefetcher.take(other, [3]).tolist() == [3]
    data.gate.release()
    assert prefetcher.take(data, [4]).tolist() == [4]
    assert data.threads == other.threads
    assert threading.get_ident() not in data.threads


def test_a_guess_that_has_not_begun_is_never_fetched(prefetcher: Prefetcher) -> None:
    """A single batch is fetched at a time."""
    data, results = Slow(), list[Tensor]()
    asker = threading.Thread(target=lambda: results.append(prefetcher.take(data, [1])))
    asker.start()
    wait_until(lambda: data.begun, "the fetch")
    prefetcher.expect(data, [2])
    prefetcher.forget()
    data.gate.release(2)
    asker.join(LIMIT_S)
    assert prefetcher.take(data, [3]).tolist() == [3]
    assert (data.begun, [batch.tolist() for batch in results]) == ([[1], [3]], [[1]])


def test_an_error_is_raised_where_the_batch_is_asked_for(prefetcher: Prefetcher) -> None:
    """The traceback shows the line of the dataset that raised the error."""
    data = Slow()
    prefetcher.expect(data, [-1])
    data.gate.release()
    with pytest.raises(OSError, match="sample -1 cannot be read") as raised:
        prefetcher.take(data, [-1])
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert frames[0] == "test_an_error_is_raised_where_the_batch_is_asked_for"
    assert frames[-1] == "__getitems__"


@pytest.mark.parametrize(
    ("draw", "generator"),
    [
        (lambda: torch.rand(()), "torch"),
        (random.random, "random"),
        (np.random.random, "numpy.random"),
    ],
)
def test_a_dataset_that_draws_from_a_global_generator_is_refused(
    draw: Callable[[], Any], generator: str
) -> None:
    """A dataset may draw from a generator of its own."""
    with pytest.raises(BadInput, match="a generator of its own") as refused:
        require_no_draws(draw)
    assert (refused.value.field, refused.value.value) == ("prefetch", generator)
    assert (
        require_no_draws(lambda: torch.rand((), generator=torch.Generator().manual_seed(3)))
        is not None
    )


# -- trainings -------------------------------------------------------------------------------------


def records(outcome: Outcome, event: Event) -> list[Record]:
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == event
    ]


def train(chaos: Chaos, job: str, *faults: Any, options: dict[str, Any], **plan: Any) -> Outcome:
    settings: dict[str, Any] = {
        "nodes": 2,
        "spares": 0,
        "shards": 4,
        "steps": 10,
        "twin": False,
    } | plan
    return chaos.run(f"{JOBS}:{job}", options=options, faults=faults, **settings)


def digests(outcome: Outcome) -> set[str]:
    """Return the digests of the final weights."""
    return {record["weights_digest"] for record in records(outcome, Event.FINISHED)}


@pytest.mark.promise("the next shard is fetched while this one is computed", job="replicas")
@pytest.mark.parametrize("job", ["replicas", pytest.param("pieces", marks=pytest.mark.slow)])
def test_the_next_batch_is_fetched_while_a_shard_is_computed(chaos: Chaos, job: str) -> None:
    """No shard ends before the fetch of the next batch began, that of the next step included."""
    train(
        chaos,
        job,
        options={"prefetch": True, "waits": True},
        **({"shards": 2} if job == "pieces" else {}),
    )


@pytest.mark.promise("no bit changes with `prefetch=True`", job="replicas")
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("replicas", {"nodes": 3}),
        pytest.param("pieces", {"spares": 1, "max_lost_steps": 1}, marks=pytest.mark.slow),
    ],
)
def test_no_bit_changes(chaos: Chaos, job: str, plan: dict[str, Any]) -> None:
    """No bit changes if a rank is lost and others compute the shards that were fetched for it, in a
    smaller world if possible.
    """
    plain = train(chaos, job, options={"prefetch": False})
    broken = train(chaos, job, Kill(rank=1, at_step=4), options={"prefetch": True}, **plan)
    assert digests(broken) == digests(plain)
    assert len(digests(plain)) == 1


@pytest.mark.slow
def test_faults_of_data_strike_what_was_fetched_ahead(chaos: Chaos) -> None:
    """A late batch and a bad one strike, each with evidence."""
    faults = [DataStall(rank=1, at_step=3, stall_ms=50.0), BadBatch(at_step=6)]
    outcome = train(chaos, "replicas", *faults, options={"prefetch": True}, nonfinite="skip")
    assert [fault.state for fault in outcome.faults] == ["confirmed", "confirmed"]
    assert {record["step"] for record in records(outcome, Event.SKIP)} == {6}


@pytest.mark.promise("What it raises is raised where the shard is asked for")
def test_what_a_dataset_raises_ends_the_rank_with_its_words(chaos: Chaos) -> None:
    """The traceback contains the lines of the dataset."""
    outcome = train(chaos, "unreadable", options={"first": 40}, check=False)
    failed = records(outcome, Event.FAILED)
    assert failed
    assert all("cannot be read" in record["error"] for record in failed)
    assert all("fetching.py" in record["traceback"].rpartition("File ")[2] for record in failed)


@pytest.mark.promise("is refused in the rehearsal if it draws from the global generators")
def test_a_job_that_draws_in_its_dataset_is_refused(chaos: Chaos) -> None:
    """The job is refused before the first step."""
    with pytest.raises(BadInput, match="a generator of its own") as refused:
        train(chaos, "drawing", options={})
    assert refused.value.field == "prefetch"
