"""Faults inside a process and of the machine around it: each shows that it took effect, and healthy
ranks go on.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.errors import BadInput
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.injection.numbers import _cell, _read, _write
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.suites.goals import all_took_effect
from chaoskit.vocabulary import Event, Verdict
from faults import (
    BadBatch,
    BitFlip,
    ClockJump,
    DataStall,
    Deadlock,
    Exit,
    Fault,
    Kill,
    NaN,
    OutOfMemory,
    Straggle,
)

JOB = "../../jobs/failing/troubled.py:plain"
WEIGHT = "3.weight"  # of the job's model, 16 values
AT = 8  # the step at which most faults strike
WORDS = re.compile(r"0x([0-9a-f]+)")


def run(chaos: Chaos, *faults: Fault, **plan: Any) -> Outcome:
    """Run an experiment of some 30 ms a step, which must pass unless the plan says otherwise."""
    settings: dict[str, Any] = {
        "nodes": 3,
        "spares": 1,
        "steps": 20,
        "deadline_s": 60.0,
        "options": {"step_s": 0.02},
    }
    return chaos.run(JOB, faults=list(faults), **settings | plan)


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def effect_of(outcome: Outcome, number: int = 0) -> str:
    """Return the effect that the target of a fault showed."""
    fault = outcome.faults[number]
    assert fault.state == "confirmed", fault
    return next(evidence.observed for evidence in fault.evidence if evidence.level == "effective")


def seconds_of_victim(outcome: Outcome) -> dict[int, float]:
    """Return the duration of each step on the struck rank, from commit to commit of that rank."""
    (injected,) = journal(outcome, Event.INJECTED)
    commits = [
        record for record in journal(outcome, Event.COMMIT) if record.source == injected["worker"]
    ]
    return {after["step"]: (after.t_ns - before.t_ns) / 1e9 for before, after in pairwise(commits)}


def assert_no_rank_was_blamed(outcome: Outcome) -> None:
    """Assert that no rank was suspected and no second plan was published."""
    assert journal(outcome, Event.DETECTED) == []
    assert len(journal(outcome, Event.PLAN)) == 1


# -- Exit ------------------------------------------------------------------------------------------


@pytest.mark.promise("it must be missed all the same", status=0, phase="optimizer")
@pytest.mark.parametrize(("status", "phase"), [(0, "backward"), (0, "optimizer"), (7, "reduce")])
def test_a_rank_that_exits_is_missed(chaos: Chaos, status: int, phase: str) -> None:
    """A rank that exits in the middle of a step is lost, also with status 0."""
    outcome = run(chaos, Exit(rank=1, at_step=AT, phase=phase, status=status))
    assert effect_of(outcome).endswith(f"exited with status {status}")
    assert len(outcome.recoveries) == 1


# -- Deadlock --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "reduce", "optimizer"])
def test_a_lock_that_is_never_released(chaos: Chaos, phase: str) -> None:
    """The progress board alone shows the hang, because the control thread lives and answers."""
    outcome = run(chaos, Deadlock(rank=1, at_step=AT, phase=phase))
    assert "wait_for_lock" in effect_of(outcome)
    assert [record["cause"] for record in journal(outcome, Event.DETECTED)] == ["hung"]


@pytest.mark.parametrize(("phase", "buckets"), [("forward", 1), ("reduce", 1), ("backward", 2)])
def test_a_rank_that_skips_the_collective(chaos: Chaos, phase: str, buckets: int) -> None:
    """All ranks wait for each other and none can be blamed: the same ranks begin the reduction
    again.
    """
    outcome = run(
        chaos, Deadlock(rank=1, at_step=AT, phase=phase, how="skip"), shards=6, buckets=buckets
    )
    assert "skip_reduction" in effect_of(outcome)
    assert "reduce of step 8" in effect_of(outcome)
    assert journal(outcome, Event.DETECTED) == []
    first, second = [
        [member["worker"] for member in record["members"]]
        for record in journal(outcome, Event.PLAN)
        if record["abort"]
    ][-2:]
    assert first == second
    announced = [record for record in journal(outcome, Event.REDUCE) if record["step"] == AT]
    assert {record["generation"] for record in announced} == {1, 2}


# -- BitFlip ---------------------------------------------------------------------------------------


def flipped(text: str) -> int:
    """Return the bits in which the two words of the evidence differ."""
    before, after = (int(word, 16) for word in WORDS.findall(text))
    return before ^ after


def assert_flipped(outcome: Outcome, bit: int) -> None:
    """Assert that the target read back a flip of this bit, once."""
    assert flipped(effect_of(outcome)) == 1 << bit
    assert f"{WEIGHT}, element 5" in effect_of(outcome)
    assert sum(record["effective"] for record in journal(outcome, Event.LEVER)) == 1


def corruptions(outcome: Outcome) -> set[tuple[int, int, str]]:
    """Return step, rank and verdict of each corruption that was reported."""
    return {
        (record["step"], record["rank"], record["verdict"])
        for record in journal(outcome, Event.CORRUPT)
    }


@pytest.mark.parametrize(
    ("where", "phase", "bit"),
    [
        ("weight", "forward", 3),
        ("weight", "backward", 31),
        ("optimizer", "reduce", 3),
        ("optimizer", "forward", 31),
    ],
)
def test_a_bit_in_the_state_has_its_rank_replaced(
    chaos: Chaos, where: str, phase: str, bit: int
) -> None:
    """A flip is found in the same step, before any commit, if the whole state is compared in every
    step.
    """
    fault = BitFlip(
        rank=1, at_step=AT, phase=phase, parameter=WEIGHT, where=where, bit=bit, element=5
    )
    outcome = run(chaos, fault, state_hash_steps=1)
    assert_flipped(outcome, bit)
    assert corruptions(outcome) == {(AT, 1, "rank")}
    assert [(record["rank"], record["cause"]) for record in journal(outcome, Event.DETECTED)] == [
        (1, "corrupt")
    ]
    outcome.assert_same_losses_as_twin()


def test_a_bit_in_the_optimizers_state_is_found_when_its_slice_is_compared(chaos: Chaos) -> None:
    """A flip is found when its sixteenth of the state is compared; gradients reduced before came
    from good weights.
    """
    fault = BitFlip(
        rank=1, at_step=AT, phase="reduce", parameter=WEIGHT, where="optimizer", bit=3, element=5
    )
    outcome = run(chaos, fault, steps=40, check=False)
    assert_flipped(outcome, 3)
    assert len(corruptions(outcome)) == 1
    step, rank, verdict = corruptions(outcome).pop()
    assert AT <= step < AT + 16
    assert (rank, verdict) == (1, "rank")
    assert {record["cause"] for record in journal(outcome, Event.DETECTED)} == {"corrupt"}


@pytest.mark.parametrize("bit", [3, 31])
def test_a_bit_in_what_was_received_costs_no_rank_its_place(chaos: Chaos, bit: int) -> None:
    """A rank that receives a flipped bit notices it before its commit, and takes the state of a
    rank that has committed.
    """
    fault = BitFlip(
        rank=1, at_step=AT, phase="reduce", parameter=WEIGHT, where="received", bit=bit, element=5
    )
    outcome = run(chaos, fault)
    assert_flipped(outcome, bit)
    assert corruptions(outcome) == {(AT, 1, "transfer")}
    assert journal(outcome, Event.DETECTED) == []
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_what_one_rank_alone_receives_as_no_number_opens_no_audit(
    chaos: Chaos, reduction: str
) -> None:
    """A rank that alone received a NaN takes the state of the others, which would take part in no
    audit.
    """
    fault = BitFlip(rank=1, at_step=AT, phase="reduce", parameter="slope", where="received", bit=30)
    plan = {
        "nodes": 4,
        "shards": 4,
        "spares": 0,
        "steps": 20,
        "deadline_s": 60.0,
        "reduction": reduction,
    }
    outcome = chaos.run("../../jobs/failing/troubled.py:with_a_slope", faults=[fault], **plan)
    assert "(1.5) before" in effect_of(outcome)
    assert "(nan) after" in effect_of(outcome)
    assert corruptions(outcome) == {(AT, 1, "transfer")}
    assert journal(outcome, Event.DETECTED, Event.NONFINITE) == []
    assert len(outcome.recoveries) == 1
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize("bit", [3, 31])
def test_a_bit_in_an_audited_gradient_is_computed_again(chaos: Chaos, bit: int) -> None:
    step = 7  # this step audits the second of three shards
    fault = BitFlip(
        rank=1,
        at_step=step,
        phase="backward",
        parameter=WEIGHT,
        where="gradient",
        bit=bit,
        element=5,
    )
    outcome = run(chaos, fault, audit_every=1)
    assert_flipped(outcome, bit)
    assert corruptions(outcome) == {(step, 1, "transient")}
    assert_no_rank_was_blamed(outcome)
    outcome.assert_same_losses_as_twin()


@pytest.mark.promise(
    "A wrong gradient that is computed, sent and received consistently is seen by audits only"
)
def test_a_bit_in_a_gradient_without_an_audit_is_trained(chaos: Chaos) -> None:
    """A flip that reaches all ranks alike shows only in the comparison with the twin, and fails the
    verdict.
    """
    fault = BitFlip(
        rank=1, at_step=AT, phase="backward", parameter=WEIGHT, where="gradient", bit=31, element=5
    )
    outcome = run(chaos, fault, check=False)
    assert_flipped(outcome, 31)
    assert corruptions(outcome) == set()
    assert_no_rank_was_blamed(outcome)
    failed = {check.name for check in outcome.checks if check.verdict == Verdict.FAILED}
    assert failed == {
        "losses equal the twin's",
        "final weights equal the twin's",
        "final state equals the twin's",
    }


def test_a_sticky_bit_in_a_gradient_is_flipped_every_time(chaos: Chaos) -> None:
    """The bit is flipped in each of the last three steps; its rank stays because there are no
    audits.
    """
    fault = BitFlip(rank=0, at_step=17, parameter=WEIGHT, where="gradient", bit=2, sticky=True)
    outcome = run(chaos, fault, spares=0, twin=False, check=False)
    assert [flipped(record["observed"]) for record in journal(outcome, Event.LEVER)] == [1 << 2] * 3
    assert_no_rank_was_blamed(outcome)


@pytest.mark.parametrize(("where", "plan"), [("gradient", {"audit_every": 1}), ("received", {})])
def test_a_sticky_bit_has_its_rank_replaced(chaos: Chaos, where: str, plan: dict[str, Any]) -> None:
    fault = BitFlip(rank=1, at_step=7, parameter=WEIGHT, where=where, bit=2, sticky=True)
    outcome = run(chaos, fault, **plan)
    assert {flipped(record["observed"]) for record in journal(outcome, Event.LEVER)} == {1 << 2}
    assert len(journal(outcome, Event.LEVER)) >= 2
    assert [(record["rank"], record["cause"]) for record in journal(outcome, Event.DETECTED)] == [
        (1, "corrupt")
    ]
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize(
    "fault", [NaN(rank=1, at_step=AT), BitFlip(rank=1, at_step=AT, bit=20)], ids=str
)
def test_without_a_name_the_first_trained_parameter_is_struck(chaos: Chaos, fault: Fault) -> None:
    """A fault without a parameter strikes the first trained one.

    A flipped bit of a weight is found within 16 steps; losses may differ until then.
    """
    outcome = run(chaos, fault, check=False, twin=False)
    assert " of 0.weight" in journal(outcome, Event.LEVER)[0]["observed"]


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ("parameter", BitFlip(rank=0, at_step=2, parameter="no.such", bit=0)),
        ("element", BitFlip(rank=0, at_step=2, parameter=WEIGHT, bit=0, element=16)),
        ("bit", BitFlip(rank=0, at_step=2, parameter=WEIGHT, bit=32)),
        (
            "key",
            BitFlip(
                rank=0, at_step=2, parameter=WEIGHT, bit=0, where="optimizer", key="momentum_buffer"
            ),
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused(chaos: Chaos, field: str, fault: BitFlip) -> None:
    """A worker that does not have the target of a fault reports it, and the run ends."""
    with pytest.raises(BadInput, match=f"^{field}="):
        run(chaos, fault, nodes=1, spares=0, steps=4, twin=False)


@given(
    dtype=st.sampled_from(
        [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
    ),
    shape=st.lists(st.integers(1, 4), max_size=3),
    transposed=st.booleans(),
    data=st.data(),
)
def test_a_flip_changes_one_bit_of_one_element(
    dtype: torch.dtype, shape: list[int], transposed: bool, data: st.DataObject
) -> None:
    """A flip changes one bit, whatever the type and the strides; a second flip restores it."""
    tensor = torch.arange(math.prod(shape)).view(shape).to(dtype)
    tensor = (
        tensor.mT.clone(memory_format=torch.contiguous_format).mT
        if transposed and len(shape) > 1
        else tensor
    )
    original = tensor.clone()
    element = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    word, value = _read(tensor, element)
    assert value == float(original.reshape(-1)[element])
    _write(tensor, element, word ^ (1 << bit))
    assert _read(tensor, element)[0] == word ^ (1 << bit)
    others = [number for number in range(tensor.numel()) if number != element]
    assert torch.equal(tensor.reshape(-1)[others], original.reshape(-1)[others])
    assert not torch.equal(
        _cell(tensor, element).view(torch.uint8), _cell(original, element).view(torch.uint8)
    )
    _write(tensor, element, word)
    assert torch.equal(tensor, original)


# -- Straggle --------------------------------------------------------------------------------------


def test_a_rank_that_sleeps_within_the_limit_is_left_alone(chaos: Chaos) -> None:
    """A rank that is late in four steps is not replaced; ``cluster/timing`` measures that the delay
    ends.
    """
    outcome = run(chaos, Straggle(rank=1, at_step=AT, delay_ms=60, steps=4))
    assert_no_rank_was_blamed(outcome)
    assert re.fullmatch(r"forward of step 8 began \d+\.\d ms late", effect_of(outcome))
    assert min(seconds_of_victim(outcome)[step] for step in range(AT + 1, AT + 4)) >= 0.24


def test_a_rank_that_sleeps_beyond_the_limit_is_replaced(chaos: Chaos) -> None:
    """A rank is replaced that sleeps longer than any limit, which may still be 10 s after eight
    steps of 20 ms.
    """
    outcome = run(chaos, Straggle(rank=1, at_step=AT, phase="backward", delay_ms=60_000))
    assert "delay" in effect_of(outcome)
    assert [record["cause"] for record in journal(outcome, Event.DETECTED)] == ["hung"]


@pytest.mark.skipif(bool(unavailable("cpu")), reason=unavailable("cpu"))
def test_a_rank_with_a_share_of_a_cpu(chaos: Chaos) -> None:
    """A rank with a share of CPU time is throttled: the share is smaller than a busy machine leaves
    to it.
    """
    fault = Straggle(rank=1, at_step=AT, how="quota", cpu_fraction=0.05, steps=6)
    outcome = chaos.run(
        "gpt", nodes=2, spares=0, steps=20, options={"size": "tiny"}, faults=[fault]
    )
    assert re.search(r"pid \d+ was held back in [1-9]\d* periods", effect_of(outcome))
    assert_no_rank_was_blamed(outcome)
    assert outcome.faults[0].undone


def test_a_thread_that_burns_cpu_time(chaos: Chaos) -> None:
    """The burning thread is found by its name, and its CPU time comes from the kernel."""
    goal = all_took_effect(chaos, 1)
    fault = Straggle(
        rank=1, at_step=AT, how="duty", cpu_fraction=0.5, steps=1000
    )  # until the evidence is there
    outcome = run(chaos, fault, until=goal.until, watch=goal)
    assert re.search(r"thread \d+ \(ck-burner\) of pid \d+ used \d+ ms of CPU", effect_of(outcome))
    assert_no_rank_was_blamed(outcome)


# -- OutOfMemory -----------------------------------------------------------------------------------


@pytest.mark.skipif(bool(unavailable("memory")), reason=unavailable("memory"))
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_the_kernel_kills_a_rank_for_its_memory(chaos: Chaos, phase: str) -> None:
    outcome = run(chaos, OutOfMemory(rank=1, at_step=AT, phase=phase))
    assert re.fullmatch(
        r"the kernel counted 1 kill for lack of memory, and pid \d+ was killed by SIGKILL",
        effect_of(outcome),
    )
    assert len(outcome.recoveries) == 1
    assert outcome.faults[0].undone


def test_a_memory_error_ends_one_rank_only(chaos: Chaos) -> None:
    outcome = run(chaos, OutOfMemory(rank=1, at_step=AT, phase="backward", how="error"))
    assert effect_of(outcome).startswith("the process ended with MemoryError (")
    assert len(outcome.recoveries) == 1


# -- ClockJump -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [86400.0, -3600.0])
def test_nothing_is_decided_by_the_wall_clock(chaos: Chaos, seconds: float) -> None:
    """A run bears the jump of a clock, also in the recovery of a rank that dies later."""
    outcome = run(chaos, ClockJump(rank=1, at_step=5, seconds=seconds), Kill(rank=2, at_step=AT))
    ahead_s = [float(text) for text in re.findall(r"([+-]\d+\.\d+) s", effect_of(outcome))]
    assert ahead_s == pytest.approx(
        [seconds, seconds], abs=60.0
    )  # one clock may be read long after the other
    assert [record["rank"] for record in journal(outcome, Event.DETECTED)] == [2]


# -- DataStall, BadBatch ---------------------------------------------------------------------------


def test_a_late_batch_is_waited_for(chaos: Chaos) -> None:
    outcome = run(chaos, DataStall(rank=1, at_step=AT, stall_ms=100))
    assert re.fullmatch(r"the batch of shard 1 of step 8 took \d+\.\d ms", effect_of(outcome))
    assert seconds_of_victim(outcome)[AT] >= 0.1
    assert_no_rank_was_blamed(outcome)


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_bad_data_is_bad_for_every_rank(chaos: Chaos, value: str) -> None:
    """A second rank computes the shard, finds it bad as well, and the batch is blamed."""
    outcome = run(chaos, BadBatch(at_step=AT, shard=1, value=value), twin=False)
    assert (
        effect_of(outcome) == "shard 1 of step 8: 0 of 32 input values not finite before, 32 after"
    )
    assert {
        (record["verdict"], *record["shards"]) for record in journal(outcome, Event.ATTRIBUTED)
    } == {("batch", 1)}
    assert [step for step, loss in enumerate(outcome.losses) if loss is None] == [AT]
    assert_no_rank_was_blamed(outcome)


def test_a_replacement_reads_the_same_bad_data(chaos: Chaos) -> None:
    """The batch is found bad although the rank that computed it dies before any rank has noticed."""
    faults = [BadBatch(at_step=AT, shard=1), Kill(rank=1, at_step=AT, phase="reduce")]
    outcome = run(chaos, *faults, twin=False)
    assert [record["verdict"] for record in journal(outcome, Event.ATTRIBUTED)] == ["batch"] * 3
    assert [step for step, loss in enumerate(outcome.losses) if loss is None] == [AT]


def test_bad_data_without_floating_point_inputs(chaos: Chaos) -> None:
    """Bytes cannot be NaN: the evidence names the loss instead."""
    fault = BadBatch(at_step=AT, shard=1, value="inf")
    outcome = chaos.run(
        "gpt", nodes=2, spares=0, steps=10, options={"size": "tiny"}, faults=[fault], twin=False
    )
    assert re.fullmatch(
        r"shard 1 of step 8 has no floating-point inputs; its loss was \d+\.\d+ before, inf after",
        effect_of(outcome),
    )
    assert [step for step, loss in enumerate(outcome.losses) if loss is None] == [AT]


def test_a_shard_that_does_not_exist_is_unknown(chaos: Chaos) -> None:
    """No rank reads such a shard, so the fault has no evidence."""
    outcome = run(chaos, BadBatch(at_step=AT, shard=50), twin=False, check=False)
    assert outcome.verdict == Verdict.UNKNOWN
    assert outcome.faults[0].state == "not observed"


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ("status", Exit(rank=0, at_step=1, status=256)),
        ("how", Deadlock(rank=0, at_step=1, how="mutex")),
        ("phase", Deadlock(rank=0, at_step=1, how="skip", phase="optimizer")),
        ("where", BitFlip(rank=0, at_step=1, parameter="w", bit=0, where="disk")),
        ("bit", BitFlip(rank=0, at_step=1, parameter="w", bit=64)),
        ("bit", BitFlip(rank=0, at_step=1, parameter="w", bit=-1)),
        ("element", BitFlip(rank=0, at_step=1, parameter="w", bit=0, element=-1)),
        (
            "phase",
            BitFlip(rank=0, at_step=1, parameter="w", bit=0, where="gradient", phase="reduce"),
        ),
        (
            "phase",
            BitFlip(rank=0, at_step=1, parameter="w", bit=0, where="received", phase="optimizer"),
        ),
        ("at_step", BitFlip(rank=0, at_step=0, parameter="w", bit=0, where="optimizer")),
        ("sticky", BitFlip(rank=0, at_step=1, parameter="w", bit=0, sticky=True)),
        ("how", Straggle(rank=0, at_step=1, how="nice")),
        ("during", Deadlock(rank=0, during="recommit", how="skip")),
        ("delay_ms", Straggle(rank=0, at_step=1, delay_ms=0)),
        ("cpu_fraction", Straggle(rank=0, at_step=1, how="duty", cpu_fraction=1.5)),
        ("steps", Straggle(rank=0, at_step=1, steps=0)),
        ("how", OutOfMemory(rank=0, at_step=1, how="swap")),
        ("seconds", ClockJump(rank=0, at_step=1, seconds=0)),
        ("seconds", ClockJump(rank=0, at_step=1, seconds=math.nan)),
        ("stall_ms", DataStall(rank=0, at_step=1, stall_ms=-1)),
        ("phase", DataStall(rank=0, at_step=1, stall_ms=1, phase="reduce")),
        ("value", BadBatch(at_step=1, value="zero")),
        ("shard", BadBatch(at_step=1, shard=-1)),
        ("phase", BadBatch(at_step=1, phase="backward")),
        ("rank", Exit(rank=2, at_step=1)),
        ("at_step", Straggle(rank=0, at_step=4)),
    ],
)
def test_what_can_never_strike_is_refused(field: str, fault: Fault) -> None:
    with pytest.raises(BadInput, match=f"^{field}="):
        fault.validate(nodes=2, steps=4)


def test_a_single_rank_has_no_collective_to_skip() -> None:
    with pytest.raises(BadInput, match=r"^nodes="):
        Deadlock(rank=0, at_step=1, how="skip").validate(nodes=1, steps=4)
