"""The loop of a hand: it reads requests, answers them, and ends effects in time.

Effects end with the program, unless the kernel has their time and they must outlive it. The program
ends at the end of its input and on SIGTERM. It also ends if its client does not read its answers,
or sends no line for some time.

-> ``hand/lines.py``: the protocol; ``hand/effects.py``: times to live.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import PROTOCOL
from .effects import EffectSchedule, LastingEffect, Silence
from .fields import EFFECT, LASTS_S, HandOperation, check_fields
from .lines import (
    LINE_SIZE_MAX_BYTES,
    RequestSplitter,
    number_in,
    read_request,
    shown,
    write_line,
)
from .refusals import RefusedRequest, Unable
from .role import EffectKeeper, Role

_READ_SIZE_BYTES = 65536
#: A pipe that can be written takes so much without blocking (POSIX).
_WRITE_SIZE_BYTES = select.PIPE_BUF
#: Answers that wait for the client to read them. A list of 1,000 processes has about 250 kB.
_UNREAD_MAX_BYTES = 2**23
#: The loop comes around at least so often. After ``_STUCK_S`` without a round, the program exits.
_ROUND_MAX_S = 1.0
_STUCK_S = 10.0  # above the time of three calls of a tool: an end makes up to three
_STUCK_STATUS = 70  # EX_SOFTWARE of sysexits.h
_RETRY_S = 1.0  # from a failed end of an effect to the next try
#: At the end of the program, no further end of an effect is tried after so long.
_ENDING_S = 10.0
_ENDING_WRITE_S = 1.0


class HandServer:
    """A hand with one client.

    Args:
        make_role: makes the role, which begins its effects by this server.
        silent_s: time without a line of the client after which the program ends, in seconds.
        input_fd: descriptor with requests.
        output_fd: descriptor for answers and events.
    """

    def __init__(
        self,
        make_role: Callable[[EffectKeeper], Role],
        silent_s: float,
        input_fd: int,
        output_fd: int,
    ) -> None:
        self._input_fd, self._output_fd = input_fd, output_fd
        self._silence = Silence(silent_s, time.monotonic())
        self._splitter = RequestSplitter()
        self._lines: collections.deque[bytes | None] = collections.deque()
        self._schedule = EffectSchedule()
        self._effects: dict[int, LastingEffect] = {}
        self._failed_ends: dict[int, str] = {}  # reasons of ends that are tried again, by effect
        self._unwritten = bytearray()
        self._end_reason = ""
        self._role = make_role(self)
        lift = HandOperation({"effect": EFFECT}, self._lift)
        self._operations: Mapping[str, HandOperation] = {
            "ping": HandOperation({}, lambda *_: {}),
            "hello": HandOperation({}, self._hello),
            "extend": HandOperation({"effect": EFFECT, "lasts_s": LASTS_S}, self._extend),
            "lift": lift,
            "resume": lift,
            "counters": HandOperation({"effect": EFFECT}, self._counters),
            **self._role.operations,
        }

    def run(self) -> str:
        """Serve the client until the program has to end, end all effects, and return the reason."""
        with _signals(self._end) as wake_fd:
            try:
                while not self._end_reason:
                    self._round(wake_fd)
            finally:
                self._end_all(self._end_reason or "error")
                _set_alarm()
                left = {"left": list(self._effects)} if self._effects else {}
                self.emit("ending", {"why": self._end_reason or "error", **left})
                self._write_rest()
        return self._end_reason

    def _round(self, wake_fd: int) -> None:
        """Carry out what is due, then answer one request, or wait for one or for a moment."""
        _set_alarm()
        self._role.collect()
        self._act(time.monotonic())
        now_s = time.monotonic()
        if self._silence.is_over(now_s) and not self._has_input():
            self._end("silence")
            return
        next_s = min(self._schedule.next_s(), self._silence.end_s(), now_s + _ROUND_MAX_S)
        next_s = min([next_s, *(effect.next_act_s() for effect in self._effects.values())])
        wait_s = 0.0 if self._lines else max(0.0, next_s - now_s)
        readers = [wake_fd] if self._lines else [wake_fd, self._input_fd]
        writers = [self._output_fd] if self._unwritten else []
        readable, writable, _ = select.select(readers, writers, [], wait_s)
        if wake_fd in readable:
            os.read(wake_fd, _READ_SIZE_BYTES)
        if writable:
            self._write()
        if self._input_fd in readable:
            self._read()
        if self._lines:
            _set_alarm()
            self._silence.hear(time.monotonic())
            self._put(self._answer(self._lines.popleft()))

    def _has_input(self) -> bool:
        """Return whether the client has sent something that has not been answered yet."""
        return bool(self._lines) or bool(select.select([self._input_fd], [], [], 0)[0])

    def _act(self, now_s: float) -> None:
        """End effects whose time is over, and carry out the acts of the others."""
        for number in self._schedule.due(now_s):
            self._try_to_end(number, "expired")
            if time.monotonic() > now_s + _ROUND_MAX_S:
                break  # slow ends must not keep the loop from requests
        for number, effect in list(self._effects.items()):
            if reason := effect.act(now_s):
                self._try_to_end(number, reason)

    # -- requests ----------------------------------------------------------------------------------

    def _read(self) -> None:
        data = os.read(self._input_fd, _READ_SIZE_BYTES)
        if not data:
            self._end("end of input")
        self._lines.extend(self._splitter.split(data))

    def _answer(self, line: bytes | None) -> dict[str, Any]:
        if line is None:
            remedy = f"send at most {LINE_SIZE_MAX_BYTES} bytes a line"
            return {"number": None, "error": {"field": "line", "value": None, "remedy": remedy}}
        try:
            request = read_request(line)
            operation = self._operations.get(request.operation)
            if operation is None:
                listed = ", ".join(self._operations)
                raise RefusedRequest("do", shown(request.operation), f"use one of {listed}")
            values = check_fields(operation.fields, request.fields)
            if "lasts_s" in operation.fields and "effect" not in operation.fields:
                self._check_number(request.number)
            return {"number": request.number, "answer": operation.act(request.number, values)}
        except RefusedRequest as refusal:
            error = {"field": refusal.field, "value": refusal.value, "remedy": refusal.remedy}
            return {"number": number_in(line), "error": error}
        except Unable as unable:
            explanation = {"reason": unable.reason, "remedy": unable.remedy}
            return {"number": number_in(line), "unable": explanation}
        except OSError as failure:  # such as too many processes or open files
            explanation = {"reason": str(failure), "remedy": "remove the cause, and try again"}
            return {"number": number_in(line), "unable": explanation}

    def _hello(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "role": self._role.name,
            "pid": os.getpid(),
            "silent_s": self._silence.limit_s,
            "operations": sorted(self._operations),
            "python": ".".join(map(str, sys.version_info[:3])),
            **self._role.hello(),
        }

    def _extend(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        effect = self._known(values["effect"])
        if values["effect"] in self._failed_ends:
            remedy = "begin another effect: the end of this one is tried until it succeeds"
            raise RefusedRequest("effect", values["effect"], remedy)
        effect.renew(values["lasts_s"])
        self._schedule.begin(values["effect"], values["lasts_s"], time.monotonic())
        return effect.evidence()

    def _lift(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        self._known(values["effect"])
        return self.end_effect(values["effect"], "lifted")

    def _counters(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        effect = self._known(values["effect"])
        left_s = self._schedule.left_s(values["effect"], time.monotonic())
        return {"kind": effect.kind, "left_s": round(left_s, 3), **effect.evidence()}

    def _known(self, number: int) -> LastingEffect:
        if number not in self._effects:
            listed = ", ".join(map(str, self._effects)) or "no effect lasts"
            raise RefusedRequest("effect", number, f"name an effect that lasts: {listed}")
        return self._effects[number]

    def _check_number(self, number: int) -> None:
        if number in self._effects:
            raise RefusedRequest("number", number, "use a number that no lasting effect has")

    # -- effects -----------------------------------------------------------------------------------

    def begin(self, number: int, effect: LastingEffect, lasts_s: float) -> None:
        """Keep an effect that has begun, under the number of its request, for so many seconds."""
        self._effects[number] = effect
        self._schedule.begin(number, lasts_s, time.monotonic())

    def begin_failed(self, number: int, effect: LastingEffect) -> None:
        """Keep an effect whose begin has failed halfway, and end it in the next round."""
        self.begin(number, effect, 0.0)
        self._failed_ends[number] = "failed"

    def number_on(self, pid: int) -> int | None:
        """Return the number of the effect on a process; None if there is none."""
        numbers = (number for number, effect in self._effects.items() if effect.pid == pid)
        return next(numbers, None)

    def end_effect(self, number: int, reason: str) -> dict[str, Any]:
        """End an effect, send the event, and return the evidence.

        Raises:
            Unable: if the end has failed. The effect is kept, and its end is tried again each
                second. Its event tells the reason of the first try.
        """
        effect = self._effects.pop(number)
        self._schedule.end(number)
        fields = {
            "effect": number,
            "kind": effect.kind,
            "why": self._failed_ends.get(number, reason),
        }
        _set_alarm()
        try:
            evidence = effect.end()
        except Unable as unable:
            self.begin(number, effect, _RETRY_S)
            if number not in self._failed_ends:
                self._failed_ends[number] = reason
                self.emit("end_failed", {**fields, "failure": str(unable)})
            raise
        self._failed_ends.pop(number, None)
        self.emit("ended", {**fields, "evidence": evidence})
        return evidence

    def _try_to_end(self, number: int, reason: str) -> None:
        with contextlib.suppress(Unable):  # its end is tried again
            self.end_effect(number, reason)

    def _end_all(self, reason: str) -> None:
        """End all effects that end with the hand. Those that fail are tried again for some time."""
        deadline_s = time.monotonic() + _ENDING_S
        while numbers := [
            number for number, effect in self._effects.items() if not effect.outlives_hand
        ]:
            for number in numbers:
                self._try_to_end(number, reason)
                if time.monotonic() + _RETRY_S > deadline_s:
                    return
            if not {*numbers}.isdisjoint(self._effects):
                time.sleep(_RETRY_S)

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """Send an event."""
        self._put({"event": event, **fields})

    def _end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason

    # -- output ------------------------------------------------------------------------------------

    def _put(self, record: Mapping[str, Any]) -> None:
        self._unwritten += write_line(record)
        if len(self._unwritten) > _UNREAD_MAX_BYTES:
            self._end("output not read")
        self._write()

    def _write(self) -> None:
        """Write as much as the client takes without blocking."""
        try:
            while self._unwritten and select.select([], [self._output_fd], [], 0)[1]:
                count = os.write(self._output_fd, self._unwritten[:_WRITE_SIZE_BYTES])
                del self._unwritten[:count]
        except OSError:  # the reader is gone
            self._unwritten.clear()
            self._end("output closed")

    def _write_rest(self) -> None:
        deadline_s = time.monotonic() + _ENDING_WRITE_S
        while self._unwritten and (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([], [self._output_fd], [], left_s)[1]:
                self._write()


def _set_alarm() -> None:
    """Let the program exit after ``_STUCK_S``, unless the alarm is set anew before."""
    signal.setitimer(signal.ITIMER_REAL, _STUCK_S)


@contextlib.contextmanager
def _signals(end: Callable[[str], None]) -> Iterator[int]:
    """Handle signals until the context ends, and yield a descriptor that they make readable.

    SIGCHLD comes for each stop of a traced thread. SIGALRM comes if the loop is stuck: an exit then
    ends all effects on processes. Rules for packets have their time in the kernel, and ``sweep``
    finds limits of bandwidth.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(_STUCK_STATUS))
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _: end(signal.Signals(number).name))
    try:
        yield wake_read
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.set_wakeup_fd(-1)
        os.close(wake_read)
        os.close(wake_write)
