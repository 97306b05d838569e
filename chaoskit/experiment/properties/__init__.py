"""Properties that a resilient run must have, each a named check of the run's journals.

The numbers are those of the table in ``docs/properties.md``. A property that does not apply to a
run, for example because no rank was restored from a copy, is neither met nor violated.

-> experiment/properties/promised.py and base.py: the time bounds. experiment/judge/judge.py: the
checks that are no properties. experiment/judge/coverage.py: journals that are incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaoskit.experiment.properties import membership, progress, steps
from chaoskit.experiment.properties.base import Property, RunTrace
from chaoskit.plaintext import plural
from chaoskit.runlog.outcome import Check
from chaoskit.vocabulary import Verdict

_SLACK = "10 s for a machine without a free CPU"
_HISTORY, _SAMPLES = "one committed history", "every sample exactly once"
_ALARMS, _LOSSES = "no false alarm", "losses equal the twin's"

PROPERTIES: tuple[Property, ...] = (
    Property(
        1,
        "safety",
        "every contribution is in",
        "No step is committed unless every shard came in exactly once, from a member of the generation.",
        steps.contributions,
    ),
    Property(
        1,
        "liveness",
        "survivors leave the collective",
        "When a rank is lost, every survivor leaves its collective and stands in a new group.",
        progress.abort,
        bound="a quarter of collective_timeout_s: by an abort, and not because gloo gave up",
    ),
    Property(
        2,
        "liveness",
        "the progress lease triggers",
        "A rank that makes no progress is given up, however alive its process and its other threads are.",
        progress.lease,
        bound=f"the longest step and recovery, twice that for each suspect before, 2 s to follow a plan, and {_SLACK}",
    ),
    Property(
        3,
        "safety",
        "long phases raise no alarm",
        "No rank is given up during an evaluation, a save or a compilation that was declared.",
        shown_by=_ALARMS,
    ),
    Property(
        4,
        "safety",
        "slow ranks are kept",
        "A rank that is slow within the limit is not given up for it.",
        progress.slow_ranks,
    ),
    Property(
        6,
        "liveness",
        "convicts are given up",
        "A rank that the job's own numbers convict is given up, however healthy its process and its node look.",
        membership.convicts,
        bound="the end of the run: the others do not commit before it is gone",
    ),
    Property(
        8,
        "safety",
        "generations increase",
        "The numbers of memberships strictly increase, over all coordinators.",
        membership.generations,
    ),
    Property(
        9,
        "safety",
        "zombies are fenced",
        "No worker contributes to a generation that it is not in, or commits in one after a newer one has settled.",
        steps.fencing,
    ),
    Property(
        10,
        "safety",
        "one commit for each step",
        "Every step number is committed with one result, on all ranks.",
        shown_by=_HISTORY,
    ),
    Property(
        11,
        "safety",
        "terms increase",
        "A coordinator has a higher term than those before it, and knows every generation that they decided.",
        membership.terms,
    ),
    Property(
        12,
        "liveness",
        "a coordinator returns",
        "When the coordinator is lost, another one takes over.",
        progress.coordinator_returns,
        bound="coordinator_outage_s: then the agents give up",
    ),
    Property(
        14,
        "safety",
        "copies are of one step",
        "All ranks that begin with copies of lost states in one generation begin with the same step.",
        steps.one_copy,
    ),
    Property(
        16,
        "safety",
        "recovery is idempotent",
        "A recovery that is interrupted in any phase and begun again does nothing twice.",
        shown_by=_SAMPLES,
    ),
    Property(
        16,
        "liveness",
        "k faults cost k bounds",
        "Faults in the recoveries from other faults add up, and do not multiply.",
        progress.cost,
        bound=f"for each loss the limits of hang, lease, plan, coordinator, healing and recall, and {_SLACK}",
    ),
    Property(
        17,
        "liveness",
        "bad nodes are set aside",
        "A node that loses worker after worker is given no more of them.",
        membership.strikes,
        bound="strikes_max losses within a minute",
    ),
    Property(
        17,
        "safety",
        "the budget is enforced",
        "A job that lost more workers than it may does not end well.",
        membership.budget,
    ),
    Property(
        19,
        "safety",
        "only sealed copies are loaded",
        "A copy whose checksum is not the sealed one is never trained on.",
        steps.sealed_copies,
    ),
    Property(
        21,
        "liveness",
        "corruption is found",
        "A flipped bit of the state, or of what was received, is found and its rank is named.",
        progress.corruption,
        bound="state_hash_steps for the state; for what was received the same step (the next one if reduction is "
        "fast); in sharded jobs for what several ranks hold",
    ),
    Property(
        21,
        "safety",
        "convicts do not commit",
        "A step in which the ranks convict one of them is not committed by it.",
        steps.suspects,
    ),
    Property(
        22,
        "safety",
        "all reduce to the same bits",
        "The reduced gradient has the same checksum on all ranks that commit it.",
        shown_by=_HISTORY,
    ),
    Property(
        23,
        "safety",
        "commits are finite",
        "No step is committed with a gradient that is not finite; a bad batch is written down as skipped.",
        steps.finite,
    ),
    Property(
        24,
        "safety",
        "samples exactly once",
        "The samples of the committed steps are those of the unbroken run, each once.",
        shown_by=_SAMPLES,
    ),
    Property(
        39,
        "safety",
        "epochs are permutations",
        "Within an epoch of a dataset no sample is dealt twice, and none that it does not have.",
        steps.epochs,
    ),
    Property(
        25,
        "safety",
        "randomness is keyed",
        "Dropout and the like do not depend on which rank computes a shard, or how often: all losses are the twin's.",
        shown_by=_LOSSES,
    ),
    Property(
        26,
        "safety",
        "a restore is complete",
        "A rank that takes over a state has all of it, the optimizer's part included.",
        steps.inventory,
    ),
    Property(
        27,
        "safety",
        "the batch keeps its size",
        "Every step has the same number of samples at every world size; the learning rate shows in the twin's losses.",
        steps.batch_size,
    ),
    Property(
        28,
        "safety",
        "the wall clock decides nothing",
        "A clock that jumps has no consequence for its rank.",
        progress.wall_clock,
    ),
    Property(
        32,
        "safety",
        "replacements are rehearsed",
        "A worker gets a rank only after it has shown that it can train a step.",
        membership.rehearsed,
    ),
    Property(
        32,
        "liveness",
        "bad replacements are replaced",
        "When a replacement fails before it is ready, another one is started.",
        membership.second_replacement,
        bound=f"the pause of 0.25 s, doubled for each failure in a row, 30 s at most, and {_SLACK}",
    ),
    Property(
        33,
        "safety",
        "joiners enter between steps",
        "A membership that only grows begins after the last step of the one before it.",
        steps.boundaries,
    ),
    Property(
        35,
        "safety",
        "committed work stays",
        "As long as a rank that committed a step goes on, that step is never computed again.",
        steps.committed_work,
    ),
    Property(
        36,
        "liveness",
        "regrouping is linear",
        "A membership settles within a time that grows at most linearly with its ranks.",
        progress.settles,
        bound=f"1 s for each rank, and {_SLACK}",
    ),
    Property(
        37,
        "safety",
        "ranks compute alike",
        "Code, versions and numeric switches of all ranks are the same.",
        membership.fingerprints,
    ),
    Property(
        38,
        "safety",
        "ranks do not wait for the monitor",
        "Ranks commit steps while there is no coordinator.",
        progress.blind,
    ),
)

#: Rows of the table without a property, since each is about one kind of fault; with the tests that
#: cover it.
LEFT_OUT: dict[int, str] = {
    5: "slow links: `suites/network/test_bad_links.py`",
    7: "asymmetric partitions: `suites/network/test_partitions.py`; that one membership commits a step is 10S",
    13: "racks: `suites/node/test_losing_nodes.py`",
    15: "the time until lost copies are made again: `suites/checkpoint/test_exposure.py`",
    18: "torn checkpoints: `suites/checkpoint/test_crash_matrix.py`",
    20: "checkpoints that cannot be restored: `suites/checkpoint/test_stored.py`",
    29: "full and slow disks: `suites/checkpoint/test_stored.py`, `suites/node/test_scarcity.py`",
    30: "memory pressure from copies: `suites/checkpoint/test_copies.py`",
    31: "object stores: `suites/checkpoint/test_remote_outage.py`",
    34: "notice before preemption: `suites/elasticity/test_storms.py`",
}


_NOT_COMPARED = (
    "not compared, as each rank alone holds its shard: weights, optimizer state and gradients"
)


def check_properties(trace: RunTrace, judged: Sequence[Check] = ()) -> list[tuple[Property, Check]]:
    """Return every property that applies to the run, with its check.

    Args:
        trace: the journals of the run.
        judged: the judge's own checks, which some properties refer to. A property that refers to a
            check that is not among them is left out.
    """
    by_name = {check.name: check for check in judged}
    checked = []
    for rule in PROPERTIES:
        if rule.shown_by:
            if rule.shown_by in by_name:
                checked.append((rule, by_name[rule.shown_by]))
            continue
        problems = rule.find(trace)
        if problems is not None:
            checked.append((rule, _check(rule, problems)))
    return checked


def _check(rule: Property, problems: list[str]) -> Check:
    """Return the check of a property with the first three of its problems."""
    if not problems:
        return Check(name=rule.title, verdict=Verdict.PASSED, detail=rule.sentence)
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return Check(name=rule.title, verdict=Verdict.FAILED, detail="; ".join(problems[:3]) + more)


def summary(checked: Sequence[tuple[Property, Check]], *, compared: bool = True) -> list[Check]:
    """Return the checks for an outcome: one for each violated property, and one for all that hold.

    Properties that the judge's own checks show are left out. Without any other property the last
    check is unknown.

    Args:
        checked: properties with their checks.
        compared: some ranks hold the same part of the state. Otherwise the last check names the
            parts that nothing compares.
    """
    own_checks = [(rule, check) for rule, check in checked if not rule.shown_by]
    broken = [check for _, check in own_checks if check.verdict != Verdict.PASSED]
    held_labels = [rule.label for rule, check in own_checks if check.verdict == Verdict.PASSED]
    detail = f"{plural(len(held_labels), 'holds', 'hold')}: {', '.join(held_labels)}" + (
        "" if compared else f"; {_NOT_COMPARED}"
    )
    verdict = Verdict.PASSED if own_checks else Verdict.UNKNOWN
    return [*broken, Check(name="properties", verdict=verdict, detail=detail)]


__all__ = ["LEFT_OUT", "PROPERTIES", "Property", "RunTrace", "check_properties", "summary"]
