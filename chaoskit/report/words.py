"""Explanations of the words in reports: a sentence for each, printed beside the word.

-> report/page.html.j2 and nightly/night.html.j2 print them.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Columns of the overview of experiments.
OVERVIEW: Mapping[str, str] = {
    "evidence": "planned faults that are proved to have taken effect, of all planned faults",
    "recovery": "time from the fault to the first step that is committed after it; the slowest of the run",
    "full strength": "time from the fault to the first step that all ranks of the full world commit",
    "lost": "committed steps that had to be computed again",
    "losses": "training losses with the same bits as in the twin, the same training without a fault",
}

#: Columns of the recovery probability.
PROBABILITY: Mapping[str, str] = {
    "recovered": "runs in which training went on after every fault, of the runs with a fault",
    "95 % interval": "the Wilson score interval, in which the true probability lies in 95 of 100 such experiments",
    "p50, p95, worst": "time to the first good step that half of the recoveries, 95 % or all of them did not exceed",
    "failed": "runs that failed, or whose test failed, including runs that recovered",
}

#: Facts about a run whose name does not say what they are.
FACTS: Mapping[str, str] = {
    "stack": "the software that trains: the runtime of chaoskit, or any command",
    "substrate": "the form of the nodes: processes, network namespaces, containers or pods",
    "reduction": "the sum of gradients: exact has the same bits at every world size, fast has not",
    "seed": "the seed of all random choices of the run",
    "session": "the name of the pytest session that made the run",
    "false alarms": "ranks that were replaced although no fault was injected into them",
    "copies in memory": "work that is repeated if all ranks end before the next copy of the state",
    "hang limits": "time in one phase of a step after which a rank is considered hung",
    "weights": "SHA-256 of the final weights; the twin is the same training without a fault",
}

#: Phases of a recovery. Each one ends at the moment that it is named after.
PHASES: Mapping[str, str] = {
    "detected": "from the fault until the loss is noticed",
    "quiesced": "until every rank has left the interrupted collective operation",
    "regrouped": "until the ranks that go on have built a new process group",
    "restored": "until joining ranks have the state of the training",
    "first good step": "until the next step is computed and committed",
    "full strength": "until all ranks of the full world train again",
    "redundancy restored": "until spares and copies are complete again, beside the training",
}

#: Parts of the wall time, beside the phases of recoveries.
PARTS: Mapping[str, str] = {
    **{name: f"recoveries, {sentence}" for name, sentence in PHASES.items()},
    "productive": "steps that were committed and kept, each counted once",
    "checkpoint stalls": "steps that waited until a copy of the state was complete",
    "recomputed": "interrupted attempts, steps that were computed again, and skipped batches",
    "first good step": "recoveries, the part of the first step that goes beyond a usual step",
    "resize": "the delay of a step after a planned change of the number of ranks",
    "waiting for nodes": "a rank was ready to train and waited for other nodes",
    "start-up": "the time until the first process group could be used",
    "closing": "the time after the last step",
    "step in flight": "the unfinished step of a run that is not over",
}

#: Ratios of the time account, by name.
RATIOS: Mapping[str, str] = {
    "goodput": "the share of the wall time that was spent on steps that count",
    "ETTR": "effective training time ratio: the share of the time in which the job trained",
    "MTTR": "mean time to recover",
    "MTTF": "mean time to failure, in hours of training",
}

#: Causes of lost time.
CAUSES: Mapping[str, str] = {
    "exited": "a process ended",
    "raised": "the code of the job raised an exception",
    "hung": "a rank made no progress",
    "log rule": "a log rule matched the output of a rank, which was replaced",
    "stopped": "a process was suspended",
    "slow": "a rank was slower than the policy allows",
    "node lost": "a node fell silent or ended",
    "unreachable": "a node could not reach the others",
    "evicted": "a node did not leave in time, and was removed",
    "unfit": "a node failed a health check",
    "nonfinite": "a rank computed a value that is not finite",
    "corrupt": "data of a rank had other bits than they should",
    "differs": "a rank computed another result than its peers",
    "planned resize": "the number of ranks was changed on request",
    "unexplained": "the ranks regrouped, and the journals do not contain the reason",
    "checkpoint": "steps waited until a copy of the state was complete",
    "waiting for nodes": PARTS["waiting for nodes"],
    "start-up": PARTS["start-up"],
    "closing": PARTS["closing"],
    "step in flight": PARTS["step in flight"],
}

#: Levels of evidence for a fault.
LEVELS: Mapping[str, str] = {
    "armed": "the target was in the planned place when the fault struck",
    "effective": "the operating system or the target shows the fault itself",
    "impactful": "the training noticed the fault",
}

#: States of a fault at the end of a run.
STATES: Mapping[str, str] = {
    "confirmed": "its effect was observed",
    "not observed": "injected, without evidence that it took effect",
    "not fired": "its moment did not come",
    "missed": "its target was gone",
    "undo failed": "the effect could not be taken back",
}

#: Checks whose name does not say what they compare.
CHECKS: Mapping[str, str] = {
    "journals are whole": "every process of the run left all its records, and all can be read",
    "committed steps kept": "steps that were committed before a fault need not be computed again",
    "one committed history": "all ranks committed the same steps with the same results",
    "every sample exactly once": "no sample of a committed step was left out or used twice",
    "no false alarm": "no rank was replaced without a fault",
    "losses equal the twin's": "the twin is the same training without a fault",
    "final weights equal the twin's": "the twin is the same training without a fault",
    "final state equals the twin's": "the twin is the same training without a fault",
    "properties": "rules that hold for every run, numbered in docs/properties.md (S: always, L: in the end)",
}

#: Columns of numbers that got worse or better.
NUMBERS: Mapping[str, str] = {
    "recovery": "time from the fault to the first step that is committed after it",
    "bound": "the sum of the references of a recovery: the time that its plain operations take alone",
    "ratio": "now divided by before; in brackets the range in which it lies with 90 % confidence",
    "versions": "the commits that were compared",
}

#: Lines of SLAs.
SLAS: Mapping[str, str] = {
    "SLA": "promises about recoveries that the runs of the history must keep",
    "broken": "the runs of its window show that a promise is not kept",
}

#: Columns of the error budgets of SLAs.
BUDGETS: Mapping[str, str] = {
    "misses allowed": "runs of the window that may miss the objective",
    "spent": "runs that missed it",
    "left": "runs that may still miss it",
}

#: Parts of a night.
NIGHT: Mapping[str, str] = {
    "control": "tests without a fault; one that fails is a trouble of the machine",
    "experiments": "tests with faults, each repeated",
    "recovery": NUMBERS["recovery"] + "; a dot for each night, with the range of its runs",
}


def cause(name: str) -> str:
    """Return the sentence for a cause of lost time, which may be inside ``false alarm (...)``.

    It is "" for an unknown cause.
    """
    if name.startswith("false alarm (") and name.endswith(")"):
        return f"a rank was replaced without a fault: {cause(name[len('false alarm (') : -1])}"
    return CAUSES.get(name, "")
