"""Names that several layers share. Each is defined here and nowhere else."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Phase(IntEnum):
    """What the main thread of a worker is doing; written to its progress board."""

    START = 0  # imports, building the model, registering it
    OUTSIDE = 1  # in the user's code, between two transactions
    FORWARD = 2
    BACKWARD = 3
    REDUCE = 4  # waiting for other ranks: never to blame for a hang
    OPTIMIZER = 5
    REGROUP = 6  # waiting for a new process group
    RESTORE = 7  # pulling state from a peer
    LONG = 8  # declared by trainer.long_phase(), or a compilation: has no time limit but ``long_limit_s``
    DONE = 9
    UNTIMED = 10  # work and waits of the runtime itself, such as at the hook of a fault: has no time limit

    @property
    def label(self) -> str:
        """Lower-case name, as used in triggers, journals and messages."""
        return self.name.lower()


#: Phases in which a step or phase trigger can stop a rank.
TRIGGER_PHASES = ("forward", "backward", "reduce", "optimizer")

#: Phases of a recovery in which a fault can strike. In all but ``detection`` a rank is stopped there.
STRIKE_PHASES = ("detection", "regroup", "restore", "recommit")

#: The phase of a worker that has yet to load its job, for faults of replacements.
LOAD = "load"

#: Phases in which a rank waits for others, so that it cannot be the one that hangs.
WAITING_PHASES = frozenset(
    {Phase.REDUCE, Phase.REGROUP, Phase.RESTORE, Phase.DONE, Phase.LONG, Phase.UNTIMED, Phase.START}
)

#: Phases of one transaction whose durations are learned, in the order of ``Beat.longest_ms``. OUTSIDE has a limit of
#: its own.
TIMED_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class Event(StrEnum):
    """Kinds of journal records. Everything that is asserted is computed from them."""

    # any process
    OPENED = "opened"  # the first: version, role, node, pid, ticks, host, boot_id, unix_ns (the same moment on the
    # wall clock), chaoskit, torch (None: not loaded), python, kernel, machine
    CLOSED = "closed"  # the last, of a process that ends in order: reason
    RECORDS_LATE = "records_late"  # the disk was full: records that were written late, full_s
    # worker
    READY = "ready"  # the worker can take a rank: fingerprint
    ENTERED = "entered"  # the train function of a sharded job, in the same process: generation, rank, cause
    REDUCE = "reduce"  # contributes shards and samples to a step: step, generation, rank, shards, samples, dataset: its size
    COMMIT = "commit"  # step, generation, rank, loss, grad_sum; piece: of a sharded state, which one this rank holds
    # stall_ms: waited for a copy of the state before it; samples, rate, multiplier: of a batch that follows the world
    ADOPT = "adopt"  # took a step that others had committed: step, generation, source
    SKIP = "skip"  # a bad batch was skipped: step, generation, shards, samples
    QUIESCED = "quiesced"  # out of the old generation's collective
    REGROUPED = "regrouped"  # the new process group can be used
    RESTORED = "restored"  # state received from a peer or a tier: step, size_bytes, transport, source, checksum
    QUARANTINED = "quarantined"  # a copy is not what was sealed, and is never offered again: step, source, detail
    NONFINITE = "nonfinite"  # step, shards, owner (None: a sum, which names no rank)
    ATTRIBUTED = "attributed"  # step, shards, verdict: rank or batch
    CORRUPT = "corrupt"  # step, what, worker, rank, verdict: rank, transient, transfer or undecided; cause, detail
    LEFT = "left"  # at a step boundary, as the world is to be without this worker: step, generation, rank
    HOOK_CALLED = "hook_called"  # one of the job's own: hook, seconds, error, and what it was told
    LONG_PHASE = "long_phase"
    HOOK_STOPPED = "hook_stopped"  # it stands where a fault is due, until that is in: fault, step, generation, rank,
    # phase; peer: the worker from which it is about to take its state, or ""
    LEVER = "lever"  # an in-process fault acted: fault, effective, observed: as read back
    STATE = "state"  # step, generation, scalars, rates, tensors: path -> start, extent of the box, numbers (sketch.py)
    # step, weights_digest, state_digest, cut_short_by, halted: by an order, sources: path -> digest of the code
    FINISHED = "finished"
    FAILED = "failed"  # error, traceback
    # agent
    WORKER_STARTED = "worker_started"
    WORKER_EXITED = "worker_exited"
    SEALED = "sealed"  # state of an ended worker that can be offered: worker, step, generation, checksum, of
    PROTECTED = "protected"  # a piece has all its copies, first in a generation or again: worker, step, piece, nodes
    EXPOSED = "exposed"  # a piece has lost copies in the middle of a generation: worker, step, piece, nodes
    COPY_FAILED = "copy_failed"  # a commit of which no copy was made: worker, step, reason
    COPY_INTERVAL = "copy_interval"  # one of so many commits is copied: every, worker, step, generation, step_ms, cost_ms
    TORN = "torn"  # a worker ended inside its update, and half of it is written: worker, step, generation
    SAVED = "saved"  # a snapshot is stored: step, generation, tier, path, size_bytes
    SAVE_FAILED = "save_failed"  # one is not: step, tier, reason
    # a pod of the run went, and the run has not asked for that: node: what the pod was for; role: node, coordinator or
    # standby; pod, cause, detail: words of the API server. Its time is that of the first sign
    POD_TAKEN = "pod_taken"
    RECORDS_CUT = "records_cut"  # a node went with records that had not come from it yet: node
    RULE_FIRED = "rule_fired"  # rule, worker, rank, generation, step, verdict, value, limit, action, reason, line
    # a command's node
    COMMAND_STARTED = "command_started"  # pid, command
    RANK_FOUND = "rank_found"  # a process below the command was started with a rank: rank, pid, ticks, variable
    RANK_GONE = "rank_gone"  # such a process has ended: rank, pid, ticks
    COMMAND_EXITED = "command_exited"  # pid, how, status
    # coordinator
    DETECTED = "detected"  # worker, rank, cause
    PLAN = "plan"  # generation, members
    SETTLED = "settled"  # every member has the group of this generation
    SPARE_READY = "spare_ready"
    NODE_LOST = "node_lost"  # node, detail: with all its workers, whether they had ranks or not
    LEFT_OUT = "left_out"  # nodes, detail: they cannot reach others, and are given no workers until they can
    RETURNED = "returned"  # nodes: they reach everybody again
    REBALANCED = "rebalanced"  # shares by worker, gain, paces by worker: slow ranks get fewer shards from now on
    STRAGGLER = "straggler"  # worker and rank (of a network: none), kind: compute, input or network; score, detail
    HANG_LIMITS = "hang_limits"  # one has moved: limits_ms, longest_ms by phase, allowance_ms, suspects until now
    ASKED = "asked"  # for another size: request, what, accepted, reason, nodes
    RESIZED = "resized"  # the world shall be of other nodes: size, wanted, nodes, reason
    EVICTED = "evicted"  # a node has not left in time: node, detail
    SET_ASIDE = "set_aside"  # node, strikes: it is given no more workers; detail: of a log rule, which asked for it
    RULE_EXCUSED = (
        "rule_excused"  # rule, worker, verdict, detail: it asked for an act, and there is none
    )
    HEALTH = "health"  # what a node has found on itself: node, standing, reasons, findings, took_ms
    RESUMED = "resumed"  # a coordinator took over from one that ended: term, generation, events
    RECORD_LOST = "record_lost"  # node, generation: it has seen this one; known: the newest of the record; detail
    CONNECTIONS_REFUSED = (
        "connections_refused"  # count: since the last such record; reason: of the last one
    )
    JOB_ENDED = "job_ended"
    # harness
    STARTED = (
        "started"  # unix_ns: the same moment on the wall clock; pid, ticks of the launcher; name, steps, nodes, spares
        # of a command: names of its nodes by number, twin: run id of the unbroken run that it is compared with, or ""
    )
    LOGGED = "logged"  # a command's log shows something: node, step, loss (its text); either may be missing
    INJECTED = "injected"  # fault, what, worker, rank, step, phase, node, pid, ticks; nodes: that it strikes as a whole
    # generation (of a command: None); waiting: the worker that stands at the fault's hook, or ""
    ACTED = "acted"  # a fault acts once more: fault, what, worker, rank, node, pid, generation; None: not known
    EVIDENCE = "evidence"  # fault, level, observed, evidence; also of what is found after the run; the last one counts
    FAULT_MISSED = "fault_missed"  # fault, what, reason: it did not act, or too late, whatever else is told of it
    NODE_REPLACED = "node_replaced"  # node: another one was started under this name
    REPLACEMENT_FAILED = (
        "replacement_failed"  # node, reason: it is tried again; the same reason is told once
    )
    LIFTED = (
        "lifted"  # a fault has ended while the run goes on, as a cut that is healed: fault, what
    )
    UNDONE = "undone"  # fault, ok: nothing of it is left; acted_ns: of its last act; starved_s: its target had no CPU
    RUN_ENDED = "run_ended"  # reason: see RunEnd; ok, detail: of the job; exits: of a command, node -> how, status


class RunEnd(StrEnum):
    """Why a run was over, as its harness saw it."""

    ENDED = "ended"  # the job said so, or the command had ended on every node
    DEADLINE = "deadline"
    STALLED = "stalled"  # a command showed no step for as long as its plan allows
    COORDINATOR_LOST = "coordinator lost"  # and no other took over
    HARNESS = "harness"  # it failed itself, was interrupted, or the job refused its input


#: Cause of the loss of a worker whose process is gone, whichever witness noticed it first: liveness mutex, pidfd or the
#: report of its parent. How it exited is known later; the record ``worker_exited`` says it.
EXITED = "exited"

#: A log rule of the user's asked for it: :mod:`chaoskit.coordinator.detectors.rulings`.
LOG_RULE = "log rule"

#: Of a rank that held the others up for too long.
HUNG = "hung"

#: Of a rank that computed slower than the others for too long.
SLOW = "slow"

#: Of a rank whose numbers were found corrupt.
CORRUPT = "corrupt"

#: Causes of losses that are decided on suspicion: the rank may have been healthy.
SUSPECTED_CAUSES = frozenset({HUNG, SLOW})

#: Causes of the loss of a rank that does not go on: which one depends on which limit is reached first.
HUNG_CAUSES = frozenset({HUNG, LOG_RULE})

#: Causes of the loss of a rank whose code fails: whatever catches the exception may also end it, or hang.
FAILED_CAUSES = HUNG_CAUSES | {EXITED, "raised"}

#: All causes for which a worker is given up.
LOSS_CAUSES = FAILED_CAUSES | {
    "stopped",
    "slow",
    "node lost",
    "unreachable",
    "evicted",
    "unfit",
    "nonfinite",
    CORRUPT,
    "differs",
}


class Verdict(StrEnum):
    """What a run proved. ``worst`` merges several."""

    PASSED = "passed"
    UNKNOWN = "unknown"
    FAILED = "failed"
    ERROR = "error"

    @property
    def exit_code(self) -> int:
        """Exit status of the commands and of a pytest session; 2 is bad input, 3 to 6 are pytest's own."""
        return _EXIT_CODES[self]

    @staticmethod
    def worst(verdicts: list[Verdict]) -> Verdict:
        """The worst of several verdicts; no verdict at all is ``unknown``."""
        return max(verdicts, key=_SEVERITY.index, default=Verdict.UNKNOWN)


_SEVERITY = [Verdict.PASSED, Verdict.UNKNOWN, Verdict.FAILED, Verdict.ERROR]
_EXIT_CODES = {Verdict.PASSED: 0, Verdict.FAILED: 1, Verdict.UNKNOWN: 10, Verdict.ERROR: 11}
EXIT_BAD_INPUT = 2

#: The recovery timeline, in order; each span ends at the moment it is named after.
RECOVERY_PHASES = (
    "detected",
    "quiesced",
    "regrouped",
    "restored",
    "first good step",
    "full strength",
    "redundancy restored",
)
