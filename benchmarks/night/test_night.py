"""The suite of chaoskit's own nightly runs: recoveries of a replicated and a sharded job, and steps
without a fault.
"""

from __future__ import annotations

from chaoskit import Chaos
from faults import Kill


def test_calm(chaos: Chaos) -> None:
    """Steps without a fault: their durations are recorded, and no rank may be reported as
    failed.
    """
    chaos.run("gpt", nodes=2, steps=40, options={"size": "tiny"}, twin=False)


def test_a_lost_rank_replicated(chaos: Chaos) -> None:
    chaos.run("gpt", nodes=2, steps=24, options={"size": "tiny"}, faults=[Kill(rank=1, at_step=14)])


def test_a_lost_rank_sharded(chaos: Chaos) -> None:
    chaos.run(
        "fsdp",
        nodes=2,
        steps=14,
        options={"size": "tiny"},
        faults=[Kill(rank=1, at_step=8)],
        twin=False,
    )
