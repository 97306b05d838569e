"""What people train with: each feature gives the same bits when the world shrinks and grows, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit.experiment.outcome import Outcome
from chaoskit.pytest_plugin import Chaos
from faults import Kill

JOBS = "jobs/features.py"
RUN: dict[str, Any] = {"nodes": 3, "spares": 0, "shards": 4, "steps": 20, "deadline_s": 120.0}


def resized(chaos: Chaos, job: str, **plan: Any) -> Outcome:
    """3 ranks, then 2, then 3: every loss and every weight must be that of the unbroken run."""
    settings = RUN | {"until": {"world": 3}} | plan
    outcome = chaos.run(f"{JOBS}:{job}", faults=[Kill(rank=1, at_step=6, phase="backward")], **settings)
    outcome.assert_same_losses_as_twin()
    worlds = [point.world for point in outcome.steps]
    assert min(worlds) == 2
    assert worlds[-1] == 3
    return outcome


@pytest.mark.slow(job="optimizers")
@pytest.mark.promise(
    "reduced with the gradients: 8 bytes a channel; two copies of the statistics a shard",
    job="batchnorm",
)
@pytest.mark.promise("nothing; gradients are summed in float32", job="autocast")
@pytest.mark.promise("gradients and losses add up; refused with `buckets` > 1", job="accumulation")
@pytest.mark.promise("tied weights, tied buffers | covered", job="tied")
@pytest.mark.promise("may thaw later, if registered before they were frozen", job="frozen")
@pytest.mark.promise(
    "from some shards: zeros there. From all: the optimizer skips them, as in plain training",
    job="experts",
)
@pytest.mark.promise("they step in this order, all of them every step", job="optimizers")
@pytest.mark.parametrize(
    "job",
    ["batchnorm", "autocast", "half", "accumulation", "tied", "frozen", "experts", "optimizers"],
)
def test_a_feature_survives_a_resize(chaos: Chaos, job: str) -> None:
    """The bits are those of the unbroken run, also of steps with the rank that joined."""
    resized(chaos, job)


@pytest.mark.parametrize(
    "plan", [{"buckets": 3, "transport": "tcp"}, {"reduction": "fast"}], ids=["overlapped, over TCP", "fast"]
)
def test_moving_buffers_travel_every_way(chaos: Chaos, plan: dict[str, Any]) -> None:
    """In several buckets, from a peer over TCP, and by plain all-reduce, which promises no bits.

    ``test_overlap.py`` shows that buckets travel while the backward pass runs.
    """
    outcome = chaos.run(f"{JOBS}:batchnorm", faults=[Kill(rank=2, at_step=6, phase="optimizer")], **RUN | plan)
    assert outcome.lost_steps == 0


@pytest.mark.slow
def test_a_compiled_model_survives_a_resize(chaos: Chaos) -> None:
    """``aot_eager`` traces forward and backward as ``inductor`` does, without the half minute of a C++ compiler."""
    resized(chaos, "compiled", options={"backend": "aot_eager"})


@pytest.mark.parametrize("reset", [False, True])
def test_a_compilation_in_the_middle_of_a_step_is_no_hang(chaos: Chaos, reset: bool) -> None:
    """The others wait for it, as long as it takes."""
    outcome = chaos.run(f"{JOBS}:compiling_late", twin=False, options={"reset": reset}, **RUN | {"steps": 14})
    assert outcome.false_alarms == 0
    assert outcome.recoveries == []
