"""Names that several layers share: phases, journal events, causes of losses, and verdicts.

-> ``journal/writer.py``: how records are written. ``runlog/``: what is computed from them.
``process/progress_board.py``: how a phase is read by other processes.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Phase(IntEnum):
    """The present activity of a worker's main thread; it is written to the progress board."""

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
        """The lower-case name that triggers, journals and messages use."""
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

#: Phases of one transaction for which durations are learned, in the order of ``Beat.longest_ms``.
#: OUTSIDE has a limit of its own.
TIMED_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class Event(StrEnum):
    """The kinds of journal records. All checks of a run are computed from these records."""

    # any process
    OPENED = "opened"  # the first record: version, role, node, pid, ticks, host, boot_id, unix_ns (the same moment on the
    # wall clock), chaoskit, torch (None: not loaded), python, kernel, machine
    CLOSED = "closed"  # the last record of a process that ends in order: reason
    RECORDS_LATE = "records_late"  # the disk was full: records that were written late, full_s
    # worker
    READY = "ready"  # the worker can take a rank: fingerprint
    ENTERED = "entered"  # the train function of a sharded job, in the same process: generation, rank, cause
    REDUCE = "reduce"  # contributes shards and samples to a step: step, generation, rank, shards, samples, dataset: its size
    COMMIT = "commit"  # step, generation, rank, loss, grad_sum; piece: of a sharded state, which one this rank holds
    # stall_ms: wait for a copy of the state before; samples, rate, multiplier: of a batch that
    # follows the world
    ADOPT = "adopt"  # took a step that others had committed: step, generation, source
    SKIP = "skip"  # a bad batch was skipped: step, generation, shards, samples
    QUIESCED = "quiesced"  # out of the old generation's collective
    REGROUPED = "regrouped"  # the new process group can be used
    RESTORED = "restored"  # state received from a peer or a tier: step, size_bytes, transport, source, checksum
    QUARANTINED = "quarantined"  # a copy differs from the sealed state, and is never offered again: step, source, detail
    NONFINITE = "nonfinite"  # step, shards, owner (None: a sum, which names no rank)
    ATTRIBUTED = "attributed"  # step, shards, verdict: rank or batch
    CORRUPT = "corrupt"  # step, what, worker, rank, verdict: rank, transient, transfer or undecided; cause, detail
    LEFT = "left"  # the worker left at a step boundary, as the next world has no place for it: step, generation, rank
    HOOK_CALLED = "hook_called"  # a callback of the job: hook, seconds, error, and its arguments
    LONG_PHASE = "long_phase"
    HOOK_STOPPED = "hook_stopped"  # the worker waits at a hook until the fault has struck: fault, step, generation,
    # rank, phase; peer: the worker from which it is about to take its state, or ""
    LEVER = "lever"  # an in-process fault acted: fault, effective, observed: as read back
    STATE = "state"  # step, generation, scalars, rates, tensors: path -> start, extent of the box, numbers (sketch.py)
    # step, weights_digest, state_digest, cut_short_by, halted: by an order, sources: path -> digest of the code
    FINISHED = "finished"
    FAILED = "failed"  # error, traceback
    # agent
    WORKER_STARTED = "worker_started"
    WORKER_EXITED = "worker_exited"
    SEALED = "sealed"  # the state of an ended worker can be offered: worker, step, generation, checksum, of
    PROTECTED = "protected"  # a piece has all its copies, for the first time or again: worker, step, piece, nodes
    EXPOSED = "exposed"  # a piece has lost copies in the middle of a generation: worker, step, piece, nodes
    COPY_FAILED = "copy_failed"  # no copy was made of a commit: worker, step, reason
    COPY_INTERVAL = "copy_interval"  # every nth commit is copied: every (n), worker, step, generation, step_ms, cost_ms
    TORN = (
        "torn"  # a worker ended inside its update, which is half written: worker, step, generation
    )
    SAVED = "saved"  # a snapshot is stored: step, generation, tier, path, size_bytes
    SAVE_FAILED = "save_failed"  # a snapshot is not stored: step, tier, reason
    # a pod of the run went without a request of the run: node: the node of the pod; role: node,
    # coordinator or standby; pod, cause, detail: the text of the API server. Its time is that of
    # the first sign
    POD_TAKEN = "pod_taken"
    RECORDS_CUT = "records_cut"  # a node went, and some of its records were not received: node
    RULE_FIRED = "rule_fired"  # rule, worker, rank, generation, step, verdict, value, limit, action, reason, line
    # a command's node
    COMMAND_STARTED = "command_started"  # pid, command
    RANK_FOUND = "rank_found"  # a process below the command was started with a rank: rank, pid, ticks, variable
    RANK_GONE = "rank_gone"  # such a process has ended: rank, pid, ticks
    COMMAND_EXITED = "command_exited"  # pid, how, status
    # a place of a running job: a container that trains is observed from now on. It may be the
    # first one, one of another pod, or a restarted one: pod, uid, machine, container, container_id, restarts, hand
    LIFE_OBSERVED = "life_observed"
    LIFE_ENDED = "life_ended"  # that container has ended: uid, container_id, cause
    MACHINE_SILENT = "machine_silent"  # the control plane does not hear of its machine: machine
    SILENCE_ENDED = "silence_ended"  # it does again, or another machine has the place: machine
    HAND_ENDED = (
        "hand_ended"  # a hand has ended, perhaps with its container: role, uid, container_id
    )
    # coordinator
    DETECTED = "detected"  # worker, rank, cause
    PLAN = "plan"  # generation, members
    SETTLED = "settled"  # every member has the group of this generation
    SPARE_READY = "spare_ready"
    NODE_LOST = "node_lost"  # node, detail: with all its workers, whether they had ranks or not
    LEFT_OUT = (
        "left_out"  # nodes, detail: they cannot reach others, and get no workers until they can
    )
    RETURNED = "returned"  # nodes: they reach all others again
    REBALANCED = "rebalanced"  # shares by worker, gain, paces by worker: slow ranks get fewer shards from now on
    STRAGGLER = "straggler"  # worker and rank (none for a network), kind: compute, input or network; score, detail
    HANG_LIMITS = "hang_limits"  # a limit has moved: limits_ms, longest_ms by phase, allowance_ms, suspects until now
    ASKED = "asked"  # a request for another size: request, what, accepted, reason, nodes
    RESIZED = "resized"  # the next world has other nodes: size, wanted, nodes, reason
    EVICTED = "evicted"  # a node has not left in time: node, detail
    SET_ASIDE = "set_aside"  # a node gets no more workers: node, strikes; detail: of the log rule that asked for it
    RULE_EXCUSED = (
        "rule_excused"  # an action of a log rule is not carried out: rule, worker, verdict, detail
    )
    HEALTH = "health"  # a node's findings on itself: node, standing, reasons, findings, took_ms
    RESUMED = "resumed"  # a coordinator took over from one that ended: term, generation, events
    RECORD_LOST = "record_lost"  # a node knows a newer generation: node, generation; known: the log's newest; detail
    CONNECTIONS_REFUSED = (
        "connections_refused"  # count: since the last such record; reason: of the last refusal
    )
    JOB_ENDED = "job_ended"
    # harness
    STARTED = (
        "started"  # unix_ns: the same moment on the wall clock; pid, ticks of the launcher; name, steps, nodes, spares
        # of a command: names of its nodes by number, twin: run id of the unbroken run that it is compared with, or ""
    )
    LOGGED = "logged"  # a line in a command's log: node, step and loss (its text) if shown, late_ns until it was read
    # the log of a container is followed, and written to log/FILE.log: file, pod, uid, container
    LOG_FOLLOWED = "log_followed"
    # a life of that container: file, life: its number, container_id, line: how many lines of the file precede it
    LOG_LIFE = "log_life"
    # lines may be missing in that file: file, pod, container, reason, detail; life and last_life: numbers of the first
    # and the last such life; after, before: the node's times of the lines around the hole, "" for none; line: as above
    LOG_HOLE = "log_hole"
    INJECTED = "injected"  # fault, what, worker, rank, step, phase, node, pid, ticks; nodes: struck as a whole
    # generation (of a command: None); waiting: the worker that stands at the fault's hook, or ""
    ACTED = "acted"  # a fault acts once more: fault, what, worker, rank, node, pid, generation; None: not known
    EVIDENCE = "evidence"  # fault, level, observed, evidence; written after the run, too; the last record counts
    FAULT_MISSED = "fault_missed"  # a fault did not act, or too late, whatever other records say: fault, what, reason
    NODE_REPLACED = "node_replaced"  # another node was started under this name: node
    REPLACEMENT_FAILED = (
        "replacement_failed"  # it is tried again: node, reason; each reason is recorded once
    )
    LIFTED = "lifted"  # a fault has ended while the run goes on, such as a healed cut: fault, what
    UNDONE = "undone"  # fault, ok: nothing of it is left; acted_ns: of its last act; starved_s: its target had no CPU
    RUN_ENDED = "run_ended"  # reason: see RunEnd; ok, detail: of the job; exits: of a command, node -> how, status


class RunEnd(StrEnum):
    """The reason for the end of a run, as its harness saw it."""

    ENDED = "ended"  # the job reported its end, or the command had ended on every node
    DEADLINE = "deadline"
    STALLED = "stalled"  # a command showed no step for as long as its plan allows
    OBSERVED = "observed"  # a training that goes on was observed for long enough after its faults
    ABORTED = "aborted"  # an abort condition of the user came true, and the faults were ended
    COORDINATOR_LOST = "coordinator lost"  # no other coordinator took over
    HARNESS = "harness"  # the harness failed or was interrupted, or the job refused its input


#: Cause of the loss of a worker of which the process is gone. The liveness mutex, the pidfd or the
#: report of its parent may show it first. The record ``worker_exited`` holds the exit status later.
EXITED = "exited"

#: Cause of a loss that a log rule of the user asked for:
#: :mod:`chaoskit.coordinator.detectors.rulings`.
LOG_RULE = "log rule"

#: Cause of the loss of a rank that held the others up for too long.
HUNG = "hung"

#: Cause of the loss of a rank that computed slower than the others for too long.
SLOW = "slow"

#: Cause of the loss of a rank with corrupt numbers.
CORRUPT = "corrupt"

#: Causes of losses that are decided on suspicion: the rank may have been healthy.
SUSPECTED_CAUSES = frozenset({HUNG, SLOW})

#: Causes of the loss of a rank that does not go on; the cause is that of the limit that is reached
#: first.
HUNG_CAUSES = frozenset({HUNG, LOG_RULE})

#: Causes of the loss of a rank of which the code fails: an exception may end the process, or make
#: it hang.
FAILED_CAUSES = HUNG_CAUSES | {EXITED, "raised"}

#: All causes of the loss of a worker.
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
    """The result of a run's checks. ``worst`` merges several."""

    PASSED = "passed"
    UNKNOWN = "unknown"
    FAILED = "failed"
    ERROR = "error"

    @property
    def exit_code(self) -> int:
        """The exit status of commands and pytest sessions; 2 is bad input, 3 to 6 pytest's own."""
        return _EXIT_CODES[self]

    @staticmethod
    def worst(verdicts: list[Verdict]) -> Verdict:
        """Return the worst of several verdicts, or ``unknown`` if there is none."""
        return max(verdicts, key=_SEVERITY.index, default=Verdict.UNKNOWN)


_SEVERITY = [Verdict.PASSED, Verdict.UNKNOWN, Verdict.FAILED, Verdict.ERROR]
_EXIT_CODES = {Verdict.PASSED: 0, Verdict.FAILED: 1, Verdict.UNKNOWN: 10, Verdict.ERROR: 11}
EXIT_BAD_INPUT = 2

#: The phases of the recovery timeline, in order; each ends at the moment that it is named after.
RECOVERY_PHASES = (
    "detected",
    "quiesced",
    "regrouped",
    "restored",
    "first good step",
    "full strength",
    "redundancy restored",
)
