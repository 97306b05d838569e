"""Pods that print numbered lines, a follower of their logs, and a count of lost and doubled lines.

-> benchmarks/pods/log_writer.py: the program in the pods. benchmarks/pods/api_proxy.py: the proxy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.pods.api_proxy import ApiProxy
from chaoskit.attach.logs.follower import LogFollower
from chaoskit.attach.logs.records import ContainerLine, LogHole
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

_IMAGE = "local.test/host:1"
_WRITER = Path(__file__).with_name("log_writer.py")
_LIMIT_S = 90.0

Key = tuple[int, int]  # a stream and a life


@dataclass(frozen=True, slots=True)
class LineCounts:
    """The counts of one case.

    Attributes:
        written: number of lines that the pod has written.
        lost: number of lines that were not delivered.
        in_holes: number of lost lines that lie in a hole.
        doubled: number of lines that were delivered again.
        holes: number of holes.
        openings: number of streams.
    """

    written: int
    lost: int
    in_holes: int
    doubled: int
    holes: int
    openings: int


class LoggingPod:
    """A pod of its own with a writer, and the follower of its log.

    Args:
        api: client of the namespace, which creates and deletes the pod.
        proxy: proxy through which the log is followed.
        silence_s: seconds without data after which a stream is opened anew.
        writer: arguments of the writer after its directory.
    """

    def __init__(
        self,
        api: KubernetesApi,
        proxy: ApiProxy,
        *,
        rate: float,
        seconds: float,
        size_bytes: int = 40,
        lives: int = 1,
        streams: int = 2,
        grace_s: int = 1,
        silence_s: float = 5.0,
    ) -> None:
        self._api, self.proxy = api, proxy
        self.name = f"log-{uuid.uuid4().hex[:8]}"
        self._directory = Path(tempfile.mkdtemp(prefix="log-", dir="/var/tmp"))
        self._directory.chmod(0o777)
        self.records: list[ContainerLine | LogHole] = []
        arguments = (rate, size_bytes, seconds, lives, streams)
        self._api.create(self._manifest(list(map(str, arguments)), grace_s))
        self._client = KubernetesApi(kubeconfig=proxy.kubeconfig, namespace=api.namespace)
        self.follower = LogFollower(self._client, self._receive, silence_s=silence_s)
        (self.place,) = self.follower.follow(api.get("Pod", self.name))

    def _manifest(self, arguments: list[str], grace_s: int) -> dict[str, Any]:
        paths = dict.fromkeys(["/usr", sys.base_prefix, str(_WRITER.parent)])
        volumes = [
            {"name": f"v{number}", "hostPath": {"path": path}} for number, path in enumerate(paths)
        ]
        mounts = [
            {"name": f"v{number}", "mountPath": path, "readOnly": True}
            for number, path in enumerate(paths)
        ]
        counts = str(self._directory)
        volumes.append({"name": "counts", "hostPath": {"path": counts}})
        mounts.append({"name": "counts", "mountPath": counts})
        python = str(Path(sys.executable).resolve())
        container = {
            "name": "writer",
            "image": _IMAGE,
            "command": [python, "-SE", str(_WRITER), counts, *arguments],
            "volumeMounts": mounts,
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name},
            "spec": {
                "restartPolicy": "OnFailure",
                "terminationGracePeriodSeconds": grace_s,
                "containers": [container],
                "volumes": volumes,
            },
        }

    def _receive(self, records: Sequence[ContainerLine | LogHole]) -> None:
        self.records.extend(records)

    # -- the pod -----------------------------------------------------------------------------------

    def written(self) -> dict[Key, int]:
        """Return the number of lines that each life has written to each stream."""
        counts: dict[Key, int] = {}
        for path in self._directory.iterdir():
            if len(data := path.read_bytes()) == 16:
                for stream, count in enumerate(struct.unpack("qq", data)):
                    counts[stream, int(path.name)] = count
        return counts

    def lives(self) -> int:
        """Return the number of lives that have begun to write."""
        return sum(stream == 0 and count > 0 for (stream, _), count in self.written().items())

    def kill(self) -> None:
        """Kill the writer, as its node sees it."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self._directory) in (process.info["cmdline"] or ()):
                os.kill(process.pid, signal.SIGKILL)

    def kill_and_await_life(self) -> None:
        """Kill the writer, and wait until its next life writes."""
        before = self.lives()
        self.kill()
        await_until(lambda: self.lives() > before, "the next life of the writer")

    def await_written(self, count: int) -> None:
        """Wait until the writer has written so many further lines."""
        before = sum(self.written().values())
        await_until(lambda: sum(self.written().values()) >= before + count, f"{count} lines")

    def delete(self, grace_s: int) -> None:
        """Delete the pod, and do not wait for its end."""
        self._api.delete("Pod", self.name, grace_s=grace_s)

    def delivered(self) -> int:
        """Return the number of delivered lines."""
        return sum(isinstance(record, ContainerLine) for record in list(self.records))

    def holes(self) -> list[LogHole]:
        """Return the holes."""
        return [record for record in list(self.records) if isinstance(record, LogHole)]

    def await_lines(self, count: int) -> None:
        """Wait until so many lines were delivered."""
        await_until(lambda: self.delivered() >= count, f"{count} lines")

    def await_end(self, limit_s: float = _LIMIT_S) -> LineCounts:
        """Wait until the log was read to its end, and return the counts."""
        await_until(lambda: self.follower.is_over(self.place), "the end of the log", limit_s)
        return self.count()

    def count(self) -> LineCounts:
        """Return the counts of the records so far."""
        written = self.written()
        numbers = [_number_of(record) for record in self.records]
        delivered = Counter(number for number in numbers if number is not None)
        lost = {
            (stream, life, number)
            for (stream, life), count in written.items()
            for number in range(count)
        } - set(delivered)
        lines_in_holes: set[tuple[int, int, int]] = set()
        for place, number in enumerate(numbers):
            if number is None:
                lines_in_holes |= _inside(lost, numbers[:place], numbers[place + 1 :])
        return LineCounts(
            written=sum(written.values()),
            lost=len(lost),
            in_holes=len(lines_in_holes),
            doubled=sum(delivered.values()) - len(delivered),
            holes=len(self.holes()),
            openings=self.follower.logs()[0].openings,
        )

    def close(self) -> None:
        """End the follower, and delete the pod."""
        self.follower.close()
        self._client.close()
        with contextlib.suppress(ApiError):
            self._api.delete("Pod", self.name, grace_s=0)
        shutil.rmtree(self._directory, ignore_errors=True)


def _number_of(record: ContainerLine | LogHole) -> tuple[int, int, int] | None:
    """Return stream, life and number of a line; None for a hole."""
    if isinstance(record, LogHole):
        return None
    stream, life, number = record.content.split(b" ", 3)[:3]
    return int(stream), int(life), int(number)


def _inside(
    lost: set[tuple[int, int, int]],
    before: Sequence[tuple[int, int, int] | None],
    after: Sequence[tuple[int, int, int] | None],
) -> set[tuple[int, int, int]]:
    """Return the lost lines that lie between the lines before and after a hole."""
    last: dict[Key, int] = {}
    for line in before:
        if line is not None:
            last[line[:2]] = max(last.get(line[:2], -1), line[2])
    first: dict[Key, int] = {}
    for line in after:
        if line is not None:
            first[line[:2]] = min(first.get(line[:2], line[2]), line[2])
    return {
        line for line in lost if last.get(line[:2], -1) < line[2] < first.get(line[:2], line[2] + 1)
    }


def await_until(condition: Callable[[], object], what: str, limit_s: float = _LIMIT_S) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: if it is not within ``limit_s`` seconds.
    """
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def cutting(proxy: ApiProxy, every_s: float) -> Iterator[None]:
    """Cut all connections of a proxy again and again."""
    over = threading.Event()

    def cut() -> None:
        while not over.wait(every_s):
            proxy.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- the cases -------------------------------------------------------------------------------------


def killed(pod: LoggingPod, times: int) -> LineCounts:
    """Kill the writer several times, a second after each of its starts."""
    for _ in range(times):
        before = pod.delivered()
        pod.await_lines(before + 100)
        pod.kill_and_await_life()
    return pod.await_end()


def deleted(pod: LoggingPod, grace_s: int) -> LineCounts:
    """Delete the pod while it is followed."""
    pod.await_lines(500)
    pod.delete(grace_s)
    return pod.await_end()


def away(pod: LoggingPod, seconds: float) -> LineCounts:
    """Refuse all connections for a while."""
    pod.await_lines(500)
    pod.proxy.refuse(refuses=True)
    time.sleep(seconds)
    pod.proxy.refuse(refuses=False)
    return pod.await_end()


def deleted_while_away(pod: LoggingPod) -> LineCounts:
    """Delete the pod while its log is not read."""
    pod.await_lines(500)
    pod.proxy.refuse(refuses=True)
    pod.await_written(200)
    pod.delete(0)
    pod.proxy.refuse(refuses=False)
    return pod.await_end()


def restarted_while_away(pod: LoggingPod, times: int) -> LineCounts:
    """Restart the writer several times while its log is not read."""
    pod.await_lines(500)
    pod.proxy.refuse(refuses=True)
    pod.await_written(100)
    for _ in range(times):
        pod.kill_and_await_life()
    pod.proxy.refuse(refuses=False)
    return pod.await_end()


def silenced(pod: LoggingPod) -> LineCounts:
    """Hold back all data of the open connections for a while, as the node of a dead kubelet does."""
    pod.await_lines(500)
    pod.proxy.silence(is_silent=True)
    openings = pod.follower.logs()[0].openings
    await_until(pod.follower.troubles, "a stream that is given up")
    pod.proxy.silence(is_silent=False)
    await_until(lambda: pod.follower.logs()[0].openings > openings, "another stream")
    return pod.await_end()
