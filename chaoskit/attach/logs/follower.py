"""Follower of the logs of many containers: a thread for each, which makes the requests.

-> attach/logs/container_log.py decides which requests are made. attach/logs/files.py stores lines.
kubernetes/api/requests.py makes them, with the rights of ``LOG_RIGHTS``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from chaoskit.attach.logs.container_log import ContainerLog
from chaoskit.attach.logs.container_status import ContainerStatus
from chaoskit.attach.logs.reader_requests import EndReading, OpenStream, ReadStatus
from chaoskit.attach.logs.records import ContainerLine, LogHole, LogPlace
from chaoskit.attach.logs.timed_lines import TimedLineSplitter
from chaoskit.substrate.kubernetes.api.log_stream import LogStream, StreamCut
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

#: Seconds without data after which a stream is opened anew. The stream of a dead node is silent
#: without an end. A kubelet may also miss the rotation of a file, which takes place at most every
#: 10 s, and then reads on in the old file: the pause must be shorter than that.
SILENCE_S = 5.0
#: Bytes that arrived before the end of a follower and were read after it. The node may have more,
#: which it could not send: a connection takes 64 KiB at least, of which the lines are a half or more.
_BACKLOG_BYTES = 8 << 10

Receiver = Callable[[Sequence[ContainerLine | LogHole]], None]


class LogFollower:
    """The logs of containers of a foreign job, followed until each pod is gone.

    Args:
        api: client of the namespace of the job.
        receive: called with each batch of lines and holes of one place, in their order. Calls come
            from several threads, one at a time.
        tail_lines: number of earlier lines of each container to begin with; None for all that its
            node still has.
        silence_s: seconds without data after which a stream is opened anew.
    """

    def __init__(
        self,
        api: KubernetesApi,
        receive: Receiver,
        *,
        tail_lines: int | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._api, self._receive = api, receive
        self._tail_lines, self._silence_s = tail_lines, silence_s
        self._lock = threading.Lock()
        self._readers: dict[LogPlace, _PlaceThread] = {}
        self._errors: list[Exception] = []

    @property
    def error(self) -> Exception | None:
        """The first unexpected error of a thread or of ``receive``; None for none.

        A log with such an error is followed no more, and ends in a hole.
        """
        return self._errors[0] if self._errors else None

    def follow(
        self, pod: Mapping[str, Any], containers: Collection[str] = (), *, from_begin: bool = False
    ) -> list[LogPlace]:
        """Start to follow the containers of a pod that are not followed yet, and return these.

        Call it with every pod that is created in the place of another.

        Args:
            pod: the object of the pod.
            containers: names of the containers; empty for all but those that only initialize.
            from_begin: True for all earlier lines that its node still has, as of a new pod.
        """
        metadata = pod["metadata"]
        places = [
            LogPlace(metadata["name"], metadata["uid"], name)
            for name in _container_names(pod)
            if not containers or name in containers
        ]
        new_places = [place for place in places if place not in self._readers]
        for place in new_places:
            log = ContainerLog(place, None if from_begin else self._tail_lines)
            reader = _PlaceThread(
                log, self._api, self._deliver, self._errors.append, self._silence_s
            )
            self._readers[place] = reader
            reader.start()
        return new_places

    @property
    def places(self) -> tuple[LogPlace, ...]:
        """All places that are or were followed."""
        return tuple(self._readers)

    def is_over(self, place: LogPlace) -> bool:
        """Return whether the log of a place has been read to its end, or its pod is gone.

        Return True after :meth:`close`, too, and False for a log that an error has ended.
        """
        return self._readers[place].is_over

    def troubles(self) -> dict[LogPlace, str]:
        """Return the places whose logs are not read at present, with the reasons."""
        return {
            place: reader.log.trouble
            for place, reader in self._readers.items()
            if reader.log.trouble and not reader.is_over
        }

    def logs(self) -> list[ContainerLog]:
        """Return the readers of all places, for their counts."""
        return [reader.log for reader in self._readers.values()]

    def close(self, limit_s: float = 2.0) -> None:
        """End all threads, and deliver what has arrived, and a hole for each log that lacks more.

        A thread that still waits for an answer of the server after ``limit_s`` seconds ends later,
        and delivers nothing more.

        Raises:
            Exception: the first error, as :attr:`error`, once all threads were ended.
        """
        until_s = time.monotonic() + limit_s
        for reader in self._readers.values():
            reader.interrupt()
        for reader in self._readers.values():
            reader.join(max(0.0, until_s - time.monotonic()))
            reader.stop()
            self._deliver(reader)
            self._deliver(reader)  # the hole, if the records were not received
        if self._errors:
            raise self._errors[0]

    def _deliver(self, reader: _PlaceThread) -> None:
        """Pass the new records of a reader on. The reader fails if they are not received."""
        with self._lock:
            if records := reader.take():
                try:
                    self._receive(records)
                except Exception as error:  # noqa: BLE001 - whatever the receiver raises
                    reader.fail(error, records)


class _PlaceThread:
    """The thread that follows one container.

    Attributes:
        log: the state machine, which makes the requests.
        error: the first unexpected error; None for none.
    """

    def __init__(
        self,
        log: ContainerLog,
        api: KubernetesApi,
        deliver: Callable[[_PlaceThread], None],
        note_error: Callable[[Exception], None],
        silence_s: float,
    ) -> None:
        self.log = log
        self.error: Exception | None = None
        self._has_ended = False
        self._has_lost_data = False  # at the interrupt
        self._has_unread = True
        self._note_error = note_error
        self._guard = threading.Lock()  # for the log, which the follower may stop
        self._api, self._deliver, self._silence_s = api, deliver, silence_s
        self._stream: LogStream | None = None
        self._splitter = TimedLineSplitter()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log {log.place.name}", daemon=True)

    @property
    def is_over(self) -> bool:
        """True if the thread has ended without an error."""
        return self._has_ended and self.error is None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def interrupt(self) -> None:
        """End the thread soon; a read of a stream returns at once."""
        self._is_stopping.set()
        if (stream := self._stream) is not None:
            stream.interrupt()

    def join(self, limit_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(limit_s)

    def stop(self) -> None:
        """End the log. What the thread still receives is ignored."""
        try:
            self._report(self.log.stop, time.monotonic(), has_unread=self._has_unread)
        except Exception as error:  # noqa: BLE001 - the other readers must be stopped, too
            self.fail(error)

    def fail(self, error: Exception, lost: Sequence[ContainerLine | LogHole] = ()) -> None:
        """End the log with a hole, and note the error.

        Args:
            lost: records that were taken, and not received.
        """
        self.error = self.error or error
        self._note_error(error)
        with self._guard:
            self.log.fail(f"{type(error).__name__}: {error}", time.monotonic(), lost)

    def take(self) -> list[ContainerLine | LogHole]:
        """Return the new records of the log."""
        with self._guard:
            return self.log.take()

    def _report(self, report: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Report to the log, unless it has ended."""
        with self._guard:
            if not isinstance(self.log.request, EndReading):
                report(*arguments, **options)

    def _run(self) -> None:
        """Carry out requests until the log has ended or the thread is stopped."""
        try:
            while not isinstance(self.log.request, EndReading) and not self._is_stopping.is_set():
                self._carry_out()
                if not self.log.has_stream:
                    self._close_stream()
                self._deliver(self)
            self._read_rest()
            self.stop()
        except Exception as error:  # noqa: BLE001 - else the log would end without a sign
            self.fail(error)
        finally:
            self._close_stream()
        self._deliver(self)
        self._has_ended = True

    def _carry_out(self) -> None:
        """Carry out the present request and report its result."""
        request = self.log.request
        if isinstance(request, ReadStatus | OpenStream):
            if self._is_stopping.wait(max(0.0, request.at_s - time.monotonic())):
                return
            if isinstance(request, ReadStatus):
                self._read_status()
            else:
                self._open(request)
        else:
            self._read()

    def _read_status(self) -> None:
        """Read the status of the container."""
        place = self.log.place
        try:
            pod = self._api.get("Pod", place.pod, is_repeated=False)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                self._report(self.log.on_status, None, time.monotonic())
            else:
                self._report(self.log.on_no_status, str(error), time.monotonic())
            return
        if pod["metadata"]["uid"] != place.pod_uid:
            self._report(self.log.on_status, None, time.monotonic(), is_replaced=True)
        else:
            self._report(
                self.log.on_status, ContainerStatus.of(pod, place.container), time.monotonic()
            )

    def _open(self, request: OpenStream) -> None:
        """Open a stream in place of the last one."""
        self._close_stream()
        try:
            self._stream = self._api.follow_log(
                self.log.place.pod,
                self.log.place.container,
                previous=request.previous,
                since=request.since,
                tail_lines=request.tail_lines,
                silence_s=self._silence_s,
            )
        except ApiError as error:
            self._report(
                self.log.on_not_open, str(error), time.monotonic(), is_refusal=error.is_refusal
            )
            return
        self._splitter = TimedLineSplitter()
        self._report(self.log.on_open, time.monotonic())

    def _read(self) -> None:
        """Wait for data of the stream."""
        stream = self._stream
        assert stream is not None, "the log asks for data of an open stream"
        if self._is_stopping.is_set():  # set before this thread could be interrupted
            return
        try:
            data = stream.read()
        except TimeoutError:
            self._report(self.log.on_silence, time.monotonic())
        except StreamCut as error:
            if self._is_stopping.is_set():
                self._has_lost_data = error.has_lost_data
            else:
                self._report(self.log.on_cut, str(error), time.monotonic())
        else:
            t_ns = time.monotonic_ns()
            if data:
                self._report(self.log.on_lines, self._splitter.feed(data), t_ns)
            else:
                self._report(self.log.on_end, self._splitter.rest(), t_ns)

    def _read_rest(self) -> None:
        """Read the data that has arrived so far, and note whether it may lack something."""
        stream, size_bytes, has_unread = self._stream, 0, self._has_lost_data
        if stream is None:
            return
        stream.interrupt()  # it may be newer than the interrupt of the follower
        try:
            while self.log.has_stream and not has_unread and (data := stream.read()):
                size_bytes += len(data)
                has_unread = self.log.is_checking
                if not has_unread:
                    lines = self._splitter.feed(data)
                    self._report(self.log.on_lines, lines, time.monotonic_ns())
        except TimeoutError:
            has_unread = True
        except StreamCut as error:
            has_unread = error.has_lost_data
        has_part = bool(self._splitter.rest())
        self._has_unread = has_unread or has_part or size_bytes > _BACKLOG_BYTES

    def _close_stream(self) -> None:
        """Close the stream if there is one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _container_names(pod: Mapping[str, Any]) -> list[str]:
    """Return the containers of a pod that run beside each other, which includes sidecars."""
    spec = pod["spec"]
    sidecars = [
        container
        for container in spec.get("initContainers") or ()
        if container.get("restartPolicy") == "Always"
    ]
    return [str(container["name"]) for container in (*spec["containers"], *sidecars)]
