"""The client of a standing hand: requests, answers and events on its stream.

-> attach/hands/start.py opens it. ``docs/architecture/hand.md``: the protocol.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from chaoskit.errors import HarnessError, NodeUnreachable

#: Seconds in which a hand answers. It answers within milliseconds, and the API server is between.
ANSWER_S = 10.0
#: Seconds in which a hand answers a question. The event loop of a run waits for it.
QUERY_S = 1.0
#: Seconds in which a hand carries out an act. The kill of a large process takes half a second.
ACT_S = 3.0
#: Interval of pings. A hand ends after 10 s without a line of its client.
PING_S = 3.0

OnEvent = Callable[[Mapping[str, Any]], None]
#: Waits for the answer to a request, for some seconds at most, and returns it.
Answer = Callable[[float], dict[str, Any]]


class HandStream(Protocol):
    """A stream of bytes to and from the standard streams of a container."""

    def receive(self, limit_s: float) -> bytes | None:
        """Return bytes that have arrived; b"" at the end, and None if none came in time.

        Raises OSError if the stream has broken: the hand may go on.
        """

    def send(self, data: bytes) -> None:
        """Send bytes. Raises OSError if the stream has ended."""

    def close(self) -> None:
        """End the stream. The hand then ends all of its effects, and itself."""


class HandUnable(HarnessError):
    """Error of a request that the kernel or a tool refused.

    Attributes:
        reason: the refusal.
        remedy: what would make the request possible.
    """

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"{name}: {reason}: {remedy}")
        self.reason, self.remedy = reason, remedy


class HandRefused(HarnessError):
    """Error of a request that the hand refused as bad input.

    Attributes:
        field: the field that is wrong. ``ticks`` stands for a process that is gone.
        value: the value that it holds.
        remedy: the correction.
    """

    def __init__(self, name: str, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{name}: {field}={value!r}: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy


class Hand:
    """A hand that waits for requests, and the thread that reads its answers.

    Any thread may make requests.

    Args:
        name: the hand in messages: its pod and its role.
        stream: stream of the container.
        on_event: called by the reading thread with each event of the hand.

    Attributes:
        has_ended: True once the end of the hand is proved. Its stream may break before.
    """

    def __init__(
        self, name: str, stream: HandStream, on_event: OnEvent = lambda event: None
    ) -> None:
        self.name = name
        self._stream, self._on_event = stream, on_event
        self._numbers = itertools.count(1)
        self._send_lock, self._changed = threading.Lock(), threading.Condition()
        self._awaited = set[int]()  # requests that wait for their answers
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._killing = set[int]()  # requests to kill pid 1 that are carried out now
        self._end_reason = ""
        self.has_ended = False
        self._is_silent = False
        self._reader = threading.Thread(target=self._read, name="ck-hand", daemon=True)
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """True until the stream of the hand has ended."""
        return not self._end_reason

    @property
    def is_silent(self) -> bool:
        """True if a request had no answer in time, and no line has arrived since."""
        return self._is_silent

    def ask(self, operation: str, *, limit_s: float = ANSWER_S, **fields: Any) -> dict[str, Any]:
        """Make a request, and return the answer with the request's ``number``.

        That is the number of the effect, if the request has begun one.

        Args:
            operation: name of the operation.
            limit_s: seconds in which the answer must come.
            fields: fields of the request.

        Raises:
            HandUnable: if the kernel or a tool refused.
            NodeUnreachable: if the hand has ended, or did not answer in time. ``may_have_acted`` is
                True once the request was sent.
            HandRefused: if the hand refused the request as bad input.
        """
        return self.post(operation, **fields)(limit_s)

    def query(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Ask a question, which changes nothing, and return the answer.

        A silent hand costs one wait of ``QUERY_S``. From then on questions fail at once, until a
        line arrives: that is the answer to a ping at the latest.

        Raises:
            HandUnable, HandRefused: as for :meth:`ask`.
            NodeUnreachable: if the hand has ended, or does not answer in time.
        """
        if self._is_silent:
            raise NodeUnreachable(f"{self.name}: it has not answered for {QUERY_S:g} s")
        try:
            return self.ask(operation, limit_s=QUERY_S, **fields)
        except NodeUnreachable as error:
            raise NodeUnreachable(str(error)) from None  # a question is no act

    def post(self, operation: str, **fields: Any) -> Answer:
        """Send a request, and return a function that waits for its answer. Call that once.

        So one thread can make requests of many hands at a time. The function takes the seconds in
        which the answer must come. It returns and raises the same as :meth:`ask`.

        Raises:
            NodeUnreachable: if the hand has ended.
        """
        number = self._post(operation, fields)
        return partial(self._await_answer, number, operation)

    def kill(self, pid: int, ticks: int, *, limit_s: float = ANSWER_S) -> dict[str, Any]:
        """Kill a process, and return the evidence.

        A hand ends with pid 1 of its target. Then the evidence is only ``{"by": "tracer"}``.

        Args:
            pid: the process, in the pid namespace of the hand.
            ticks: its start time, which no later process with this pid has.

        Raises:
            HandUnable, NodeUnreachable, HandRefused: as for :meth:`ask`.
        """
        number = self._post("kill", {"pid": pid, "ticks": ticks})
        line = self._await_line(number, limit_s)
        if line is not None:
            return self._answer(line)
        if number in self._killing and not self.is_open:
            return {"by": "tracer"}
        raise self._gone("kill", limit_s)

    def close(self) -> None:
        """End the hand, and with it all of its effects."""
        self._note_end("it was closed")
        self._stream.close()
        if threading.current_thread() is not self._reader:
            self._reader.join(ANSWER_S)

    def _answer(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer in a line of the hand.

        Raises HandUnable for a refusal of the kernel, and HandRefused for one of the hand.
        """
        if (unable := line.get("unable")) is not None:
            raise HandUnable(self.name, unable["reason"], unable["remedy"])
        if (error := line.get("error")) is not None:
            raise HandRefused(self.name, error["field"], error["value"], error["remedy"])
        return dict(line["answer"])

    def _post(self, operation: str, fields: Mapping[str, Any]) -> int:
        """Send a request, and return its number. Raises NodeUnreachable if the stream has ended."""
        number = next(self._numbers)
        self._awaited.add(number)
        try:
            self._send(number, operation, fields)
        except NodeUnreachable:
            self._awaited.discard(number)
            raise
        return number

    def _await_answer(self, number: int, operation: str, limit_s: float) -> dict[str, Any]:
        """Return the answer to a request, with its number. Raises the same as :meth:`ask`."""
        line = self._await_line(number, limit_s)
        if line is None:
            with contextlib.suppress(NodeUnreachable):  # its effect may begin later
                self._send(next(self._numbers), "lift", {"effect": number})
            raise self._gone(operation, limit_s)
        return {"number": number, **self._answer(line)}

    def _await_line(self, number: int, limit_s: float) -> Mapping[str, Any] | None:
        """Return the line that answers a request.

        It is None if none came in time, or the stream has ended first.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: number in self._answers or self._end_reason, limit_s)
                line = self._answers.pop(number, None)
                self._is_silent = self._is_silent or line is None
                return line
        finally:
            self._awaited.discard(number)

    def _gone(self, operation: str, limit_s: float) -> NodeUnreachable:
        """Return the error of a request without an answer."""
        why = self._end_reason or f"it did not answer {operation} within {limit_s:g} s"
        return NodeUnreachable(f"{self.name}: {why}", may_have_acted=True)

    def _send(self, number: int, operation: str, fields: Mapping[str, Any]) -> None:
        """Send a request. Raises NodeUnreachable if the stream has ended."""
        if self._end_reason:  # its pipe may still take a line
            raise NodeUnreachable(f"{self.name}: {self._end_reason}")
        line = json.dumps({"number": number, "do": operation, **fields}).encode() + b"\n"
        try:
            with self._send_lock:
                self._stream.send(line)
        except OSError as error:
            self._note_end(str(error))
            raise NodeUnreachable(f"{self.name}: {self._end_reason}") from None

    # -- the reading thread ------------------------------------------------------------------------

    def _read(self) -> None:
        """Note answers and events until the stream ends. An error ends the hand."""
        try:
            self._read_lines()
        except Exception as error:  # noqa: BLE001 - such as one of on_event
            self._note_end(f"its answers are not read any more: {error!r}")
            self._stream.close()

    def _read_lines(self) -> None:
        """Note answers and events until the stream ends, and ping a hand that is not asked."""
        rest, pinged_s = b"", time.monotonic()
        while self.is_open:
            try:
                data = self._stream.receive(PING_S)
            except OSError as error:
                self._note_end(str(error))
                return
            if data == b"":
                self.has_ended = True
                self._note_end("it has ended")
                return
            *lines, rest = (rest + (data or b"")).split(b"\n")
            for line in lines:
                self._take(line)
            if time.monotonic() - pinged_s >= PING_S:
                pinged_s = time.monotonic()
                with contextlib.suppress(NodeUnreachable):
                    self._send(next(self._numbers), "ping", {})

    def _take(self, line: bytes) -> None:
        """Note the answer or the event of a line. Another line is ignored."""
        try:
            record = json.loads(line)
        except ValueError:  # output of another program in the container
            return
        if not isinstance(record, dict):
            return
        with self._changed:
            self._is_silent = False
            if (number := record.get("number")) in self._awaited:
                self._answers[number] = record
            elif record.get("event") == "killing":
                self._killing.add(record["request"])
            self._changed.notify_all()
        if "event" in record:
            self._on_event(record)

    def _note_end(self, reason: str) -> None:
        with self._changed:
            self._end_reason = self._end_reason or reason
            self._changed.notify_all()
