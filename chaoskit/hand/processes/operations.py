"""The role on processes: it kills, stops and throttles the processes of its pid namespace.

It may also take CPU time from them, if it is in their cgroup.

It needs no capability if it runs as the user and the group of its targets.

-> ``hand/processes/held.py``: stops; ``hand/processes/kill.py``: kills; ``hand/processes/load.py``:
CPU load; ``hand/processes/proc.py``: the list of processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from ..fields import LASTS_S, PID, TICKS, HandOperation, RequestField, decimal, flag, whole
from ..refusals import ProcessGone, RefusedRequest
from ..role import EffectKeeper
from . import kill, proc
from .held import Stop, Throttle
from .load import Load
from .signals import INIT, send_signal
from .tcp import tcp_troubles
from .tracer import Tracer

_IDENTITY = {"pid": PID, "ticks": TICKS}
#: Below 10 ms the stops themselves take most of the time of a process with many threads.
_PERIOD_MS = RequestField(whole(10, 10_000), 100)
_VARIABLES = RequestField(flag, True)
_SIGNUM = RequestField(whole(1, signal.NSIG - 1))
#: Signals that other operations send in a way that does not outlive the hand, or reaches pid 1.
_OTHER_OPERATIONS = {
    signal.SIGKILL: "use the operation kill",
    **dict.fromkeys(
        (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
        "use the operation stop, which ends with the hand",
    ),
}
#: CPUs that a load leaves to others.
_CORES = RequestField(decimal(0.0, 10_000.0))
_PART = RequestField(decimal(0.0, 0.99))
#: The pid namespace in which the machine has booted (PROC_PID_INIT_INO of the kernel).
_MACHINE_NAMESPACE = "pid:[4026531836]"


class ProcessRole:
    """Operations on processes.

    Args:
        keeper: keeps the effects.
    """

    name = "processes"

    def __init__(self, keeper: EffectKeeper) -> None:
        self._keeper = keeper
        self._tracer = Tracer()
        self.operations: Mapping[str, HandOperation] = {
            "list": HandOperation({"variables": _VARIABLES}, self._list),
            "find": HandOperation({"pid": PID}, self._find),
            "look": HandOperation(_IDENTITY, self._look),
            "threads": HandOperation(_IDENTITY, self._threads),
            "tcp": HandOperation(_IDENTITY, self._tcp),
            "signal": HandOperation({**_IDENTITY, "signum": _SIGNUM}, self._signal),
            "kill": HandOperation(_IDENTITY, self._kill),
            "stop": HandOperation({**_IDENTITY, "lasts_s": LASTS_S}, self._stop),
            "throttle": HandOperation(
                {**_IDENTITY, "share": _PART, "period_ms": _PERIOD_MS, "lasts_s": LASTS_S},
                self._throttle,
            ),
            "load": HandOperation({"cores": _CORES, "lasts_s": LASTS_S}, self._load),
        }

    def hello(self) -> dict[str, Any]:
        """Return this process's identity, the rules that apply to it, and the processes."""
        return {
            "uid": os.geteuid(),
            "gid": os.getegid(),
            "ticks_per_s": proc.TICKS_PER_S,
            "ptrace_scope": proc.yama_scope(),
            "processes": list(proc.processes()),
        }

    def collect(self) -> None:
        """Take in stops and ends of threads, so that parents of ended processes are notified."""
        self._tracer.collect()

    def _list(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"processes": list(proc.processes(values["variables"]))}

    def _find(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return proc.process_fields(values["pid"]) or {"gone": True}

    def _threads(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        pid, ticks = values["pid"], values["ticks"]
        threads = list(proc.threads(pid))
        return _if_same(pid, ticks, {"threads": threads})

    def _tcp(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        pid, ticks = values["pid"], values["ticks"]
        return _if_same(pid, ticks, tcp_troubles(pid))

    def _signal(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        pid, ticks, signum = values["pid"], values["ticks"], values["signum"]
        self._check_target(pid)
        if signum in _OTHER_OPERATIONS:
            raise RefusedRequest("signum", signum, _OTHER_OPERATIONS[signum])
        send_signal(pid, ticks, signum)
        return kill.evidence(pid, ticks)

    def _look(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        pid, ticks = values["pid"], values["ticks"]
        look = proc.look(pid)
        evidence = kill.evidence(pid, ticks)
        if look is None or evidence["gone"]:
            return {"gone": True}
        return {**evidence, **look.as_fields()}

    def _kill(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        pid, ticks = values["pid"], values["ticks"]
        self._check_target(pid)
        if proc.same_process(pid, ticks) is None:
            raise ProcessGone(pid, ticks)
        number_on = self._keeper.number_on(pid)
        if pid == INIT and number_on is not None:
            self._keeper.end_effect(number_on, "killed")  # a process has one tracer only

        def announce() -> None:
            self._keeper.emit("killing", {"request": number, "pid": pid, "by": "tracer"})

        return kill.kill(pid, ticks, announce)

    def _stop(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        self._check_free(values["pid"])
        stop = Stop(self._tracer, values["pid"], values["ticks"])
        self._keeper.begin(number, stop, values["lasts_s"])
        return {"took_ms": stop.took_ms, **stop.evidence()}

    def _throttle(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        self._check_free(values["pid"])
        throttle = Throttle(
            self._tracer,
            values["pid"],
            values["ticks"],
            values["share"],
            values["period_ms"] / 1000,
        )
        self._keeper.begin(number, throttle, values["lasts_s"])
        return throttle.evidence()

    def _load(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        load = Load(values["cores"])
        self._keeper.begin(number, load, values["lasts_s"])
        return load.evidence()

    def _check_free(self, pid: int) -> None:
        self._check_target(pid)
        number = self._keeper.number_on(pid)
        if number is not None:
            raise RefusedRequest("pid", pid, f"lift the effect {number} on this process before")

    def _check_target(self, pid: int) -> None:
        if pid == os.getpid():
            raise RefusedRequest("pid", pid, "name another process: this is the hand")
        if pid == INIT and os.readlink("/proc/self/ns/pid") == _MACHINE_NAMESPACE:
            raise RefusedRequest("pid", pid, "name another process: this is init of the machine")


def _if_same(pid: int, ticks: int, fields: dict[str, Any] | None) -> dict[str, Any]:
    """Return fields that were read of a process, or ``gone`` if it was not that process."""
    is_same = proc.same_process(pid, ticks) is not None
    return fields if is_same and fields is not None else {"gone": True}
