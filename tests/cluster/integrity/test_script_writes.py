"""Scripts that change registered state between steps: the state of a step is that of the next
transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.training.averaging import PLACES
from torch import nn

from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.script_writes import ABSTAINS, ScriptWrite, ScriptWrites, Writes
from chaoskit.vocabulary import Verdict
from faults import Hang, Kill, Scale

JOB = str(Path(__file__).parents[2] / "jobs" / "training" / "averaging.py")
STEPS = 20
TRAINED = {"how", "first", "ranks"}  # options of the training itself, not of its faults


def run(
    chaos: Chaos,
    tmp_path: Path,
    *,
    most_lost: int = 0,
    most_detected: int = 0,
    sharded: bool = False,
    **plan: Any,
) -> Outcome:
    """Run a job that must end with the bits of its twin, although ranks end themselves between two
    steps.
    """
    options = {"marks": str(tmp_path)} | plan.pop("options", {})
    settings = {"nodes": 3, "spares": 1, "steps": STEPS, "deadline_s": 90.0} | plan
    job = f"{JOB}:train_sharded" if sharded else JOB
    outcome = chaos.run(
        job, twin=False, check=False, options=options, max_lost_steps=most_lost, **settings
    )
    problems = [
        check
        for check in outcome.checks
        if check.verdict != Verdict.PASSED and check.name != "no false alarm"
    ]
    assert not problems, outcome.directory
    assert not outcome.records("corrupt"), outcome.directory
    ended = sum(len(ranks) for ranks in options.get("fatal", {}).values()) + most_detected
    assert len(outcome.records("detected")) <= ended, outcome.directory
    common = {"nodes": settings["nodes"], "steps": len(outcome.steps)}
    unbroken = plan_experiment(
        job, options={name: options[name] for name in TRAINED & {*options}}, **common
    )
    twin = chaos.harness.twin(unbroken)
    assert [point.loss for point in outcome.steps] == twin.losses, outcome.directory
    assert outcome.weights_digest == twin.weights_digest, outcome.directory
    assert outcome.lost_steps <= most_lost, outcome.directory
    return outcome


@pytest.mark.promise(
    "the state of a step is what is registered when the next transaction is entered",
    sharded=False,
    place="written",
)
@pytest.mark.slow(sharded=True)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_ends_while_the_script_writes(
    chaos: Chaos, tmp_path: Path, place: str, sharded: bool
) -> None:
    options = {"fatal": {"7": [1], "13": [0]}, "place": place}
    run(chaos, tmp_path, sharded=sharded, most_lost=2 if sharded else 0, options=options)


@pytest.mark.parametrize("phase", ["forward", "reduce"])
def test_a_sharded_rank_ends_in_the_step_after_a_write(
    chaos: Chaos, tmp_path: Path, phase: str
) -> None:
    """The ranks that are left have noticed their writes; their successors restore them."""
    faults = [Kill(rank=1, at_step=7, phase=phase)]
    run(chaos, tmp_path, sharded=True, most_lost=2, most_detected=1, faults=faults)


@pytest.mark.parametrize(
    "how", ["hook", "statistics", "data", "replaced", "rate", "mask", "nothing"]
)
def test_every_kind_of_write_survives_a_loss(chaos: Chaos, tmp_path: Path, how: str) -> None:
    run(chaos, tmp_path, options={"how": how, "fatal": {"8": [1]}, "place": "written"})


@pytest.mark.parametrize("place", ["within", "after"])
def test_every_rank_ends_while_the_script_writes(chaos: Chaos, tmp_path: Path, place: str) -> None:
    """The step is computed again, with the same bits."""
    options = {"fatal": {"9": [0, 1, 2]}, "place": place}
    outcome = run(chaos, tmp_path, copies="every_step", options=options)
    assert len(outcome.steps) == STEPS


def test_a_script_that_begins_to_write_late(chaos: Chaos, tmp_path: Path) -> None:
    run(chaos, tmp_path, options={"first": 8, "fatal": {"9": [1], "10": [0]}, "place": "within"})


def test_a_collective_finds_the_state_of_its_own_place(chaos: Chaos, tmp_path: Path) -> None:
    """A joiner that has written a second time computes with the state of the ranks that
    wait in the call.
    """
    options = {"how": "measured", "fatal": {"8": [1], "14": [0]}, "place": "measured"}
    run(chaos, tmp_path, options=options)


def test_a_rank_ends_in_the_code_behind_a_restored_step(chaos: Chaos, tmp_path: Path) -> None:
    options = {"fatal": {"9": [0, 1, 2]}, "revisited": {"8": [2], "9": [1]}, "place": "within"}
    run(
        chaos,
        tmp_path,
        spares=0,
        copies="every_step",
        options=options,
        most_detected=2,
        most_lost=1,
    )


def test_every_rank_ends_behind_the_last_step(chaos: Chaos, tmp_path: Path) -> None:
    run(
        chaos,
        tmp_path,
        copies="every_step",
        options={"fatal": {str(STEPS): [0, 1]}, "place": "within"},
    )


def test_a_script_that_catches_an_exception_of_its_loop(chaos: Chaos, tmp_path: Path) -> None:
    run(chaos, tmp_path, options={"stumbles": 5})


def test_the_same_bits_on_one_rank_only(chaos: Chaos, tmp_path: Path) -> None:
    run(chaos, tmp_path, options={"how": "swapped", "ranks": [0], "first": 5})


@pytest.mark.promise(
    "at the end of the update, behind the schedulers, once for each committed step"
)
def test_plain_pytorch_changes_the_same(chaos: Chaos) -> None:
    options = {"how": "hook"}
    chaos.run(
        JOB,
        nodes=2,
        steps=10,
        twin=False,
        reference="required",
        options=options,
        faults=[Kill(rank=1, at_step=4)],
    )


def test_a_function_that_comes_too_late_is_refused(chaos: Chaos) -> None:
    with pytest.raises(
        BadInput, match="after_update='change': call it before the first transaction"
    ):
        chaos.run(JOB, nodes=1, spares=0, steps=4, twin=False, check=False, options={"how": "late"})


def test_a_hang_and_a_kill(chaos: Chaos, tmp_path: Path) -> None:
    run(
        chaos,
        tmp_path,
        most_detected=2,
        spares=2,
        faults=[Kill(rank=0, at_step=6, phase="optimizer"), Hang(rank=1, at_step=12)],
    )


def test_a_resized_world(chaos: Chaos, tmp_path: Path) -> None:
    elastic = ElasticPolicy(min_replicas=1, max_replicas=3, scaling_timeout_s=0.0)
    faults = [Scale(to=2, at_step=5), Scale(to=3, at_step=12)]
    run(
        chaos,
        tmp_path,
        spares=0,
        elastic=elastic,
        faults=faults,
        options={"step_s": 0.05},
        steps=40,
    )


def test_only_the_disk_has_it(chaos: Chaos, tmp_path: Path) -> None:
    """Ranks that all end go on from the newest stored state if there are no copies in memory."""
    disk = {"target": str(tmp_path / "disk"), "every_steps": 1}
    options = {"fatal": {"9": [0, 1, 2]}, "place": "within", "step_s": 0.1}
    run(chaos, tmp_path, memory_copies=0, disk=disk, most_lost=STEPS, options=options)


def test_writes_on_some_ranks_only_are_refused(chaos: Chaos, tmp_path: Path) -> None:
    refusal = r"changed on ranks \[0\] and not on ranks \[1, 2\] between steps 0 and 1.*trainer.after_update"
    with pytest.raises(BadInput, match=refusal):
        chaos.run(JOB, nodes=3, steps=STEPS, twin=False, check=False, options={"ranks": [0]})


def test_writes_that_differ_are_refused(chaos: Chaos, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput,
        match=r"changed to other values on each of the ranks \[0, 1\] between steps 0 and 1",
    ):
        chaos.run(
            JOB, nodes=2, steps=STEPS, twin=False, check=False, options={"how": "differently"}
        )


# -- without processes -----------------------------------------------------------------------------


def made(*, shared: bool) -> tuple[nn.Module, torch.optim.Optimizer, Replica, ScriptWrites]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40))
    optimizer = torch.optim.AdamW(model.parameters())
    replica = Replica(model, optimizer, None, shared=shared)
    for parameter in replica.parameters:
        parameter.grad = torch.ones_like(parameter)
    with replica.update():
        replica.advance()
    writes = ScriptWrites()
    writes.watch(replica, replica.arena)
    return model, optimizer, replica, writes


def write_through_numpy(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model[0].weight.detach().numpy()[:] *= 2  # type: ignore[index]


WRITES: dict[str, Callable[[Any, Any], object]] = {
    "in place": lambda model, optimizer: model[0].weight.detach().add_(1),
    "through .data": lambda model, optimizer: model[0].weight.data.add_(1),
    "through NumPy": write_through_numpy,
    "by a new tensor": lambda model, optimizer: setattr(
        model[0].weight, "data", model[0].weight.data + 1
    ),
    "into the state of the optimizer": lambda model, optimizer: next(
        iter(optimizer.state.values())
    )["exp_avg"].zero_(),
    "by a rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_noticed(name: str, shared: bool) -> None:
    model, optimizer, _, writes = made(shared=shared)
    writes.remember()
    WRITES[name](model, optimizer)
    change = writes.look()
    without_trace = not shared and name in ("through .data", "through NumPy")
    assert change is (ScriptWrite.POSSIBLE if without_trace else ScriptWrite.CERTAIN)
    assert writes.at_entry


def test_damage_of_one_word_is_no_certain_write() -> None:
    model, _, _, writes = made(shared=True)
    writes.remember()
    model[0].weight.data.view(torch.int32)[3, 3] ^= 1  # type: ignore[index, operator]
    assert writes.look() is ScriptWrite.POSSIBLE


def test_a_script_that_writes_nothing_keeps_the_commit_as_its_boundary() -> None:
    model, _, _, writes = made(shared=True)
    assert writes.at_entry, "until the first transaction has shown that the script writes nothing"
    writes.remember()
    model.eval()(torch.randn(4, 40)).sum().backward()
    assert writes.look() is ScriptWrite.NONE
    assert not writes.at_entry
    assert writes.word == 0


def test_once_written_the_boundary_stays_at_the_entry() -> None:
    model, optimizer, _, writes = made(shared=True)
    for name in ("in place", ""):
        writes.remember()
        WRITES.get(name, lambda model, optimizer: None)(model, optimizer)
        writes.look()
        assert writes.at_entry


def test_what_was_written_with_the_same_bits_is_no_change() -> None:
    model, _, _, writes = made(shared=True)
    writes.remember()
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert writes.look() is ScriptWrite.NONE


def test_the_state_tells_a_new_process_that_the_script_writes() -> None:
    model, optimizer, replica, writes = made(shared=True)
    writes.remember()
    WRITES["in place"](model, optimizer)
    writes.look()
    _, _, successor, its_writes = made(shared=True)
    successor.load_scalars(replica.scalars(), 1)
    its_writes.remember()
    assert its_writes.look() is ScriptWrite.NONE
    assert its_writes.at_entry


def test_a_second_look_at_one_step_keeps_what_the_first_found() -> None:
    """A script may catch an exception of its loop, and enter the transaction again."""
    model, optimizer, _, writes = made(shared=True)
    writes.remember()
    WRITES["in place"](model, optimizer)
    writes.look()
    word = writes.word
    writes.look()
    writes.remember()
    writes.look()
    assert writes.word == word != 0


def test_a_restored_state_holds_the_writes_so_no_rank_shows_them_again() -> None:
    """A new rank of a sharded job has noticed none of the writes that the others have noticed."""
    model, optimizer, replica, writes = made(shared=True)
    writes.remember()
    WRITES["in place"](model, optimizer)
    writes.look()
    assert writes.word != 0
    assert writes.state_word != 0
    writes.watch(replica, replica.arena)
    assert (writes.word, writes.state_word) == (0, 0)


@pytest.mark.parametrize(
    ("words", "state_words", "writers", "silent"),
    [
        ([0, 0, 0], [0, 0, 0], None, []),
        ([5, 5, ABSTAINS], [9, 9, 0], None, []),
        ([5, 4, 5], [9, 9, 9], None, []),  # a certain change and a possible one
        ([5, 0, 5], [9, 0, 9], [0, 2], [1]),
        ([5, 7, 5], [9, 9, 9], [0, 1, 2], []),
        ([5, 5, 5], [9, 8, 9], [0, 1, 2], []),
        ([5, 5, 5], [9, 0, 9], None, []),  # the second rank has shown its state before
        (
            [4, 0, 0],
            [9, 0, 0],
            None,
            [],
        ),  # possible: damage, which the vote about corrupt ranks finds
    ],
)
def test_writes_that_are_not_alike(
    words: list[int], state_words: list[int], writers: list[int] | None, silent: list[int]
) -> None:
    result = Writes.of(words, state_words)
    assert result == (Writes(writers, silent) if writers is not None else None)


@pytest.mark.parametrize(
    ("silent", "states", "refused"),
    [
        ([1], [b"a", b"a", b"a"], False),  # the same bits were written
        ([1, 2], [b"a", b"b", b"b"], True),
        ([], [b"a", b"b", b"a"], False),  # damage of one rank
        ([], [b"a", b"b"], True),
        ([], [b"a", b"b", b"c"], True),
    ],
)
def test_a_script_is_blamed_for_what_it_wrote(
    silent: list[int], states: list[bytes], refused: bool
) -> None:
    assert Writes([0], silent).is_refused(states) is refused
