"""Measure the cost of observing a training:
``python -m benchmarks.steps.observing [--quick] [--results DIRECTORY]``.

The observers of one run take turns: none, a client that scrapes the metrics endpoint every second,
``chaoskit top`` in a terminal, and none again. Writes results/observing.json. Exit status 1 if the
bar is not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.bars import Bar, Report, look_at_machine, show, spread
from benchmarks.harness.lab import Lab, show_progress
from benchmarks.harness.results import RESULTS, save
from chaoskit.journal import Record
from chaoskit.observe.watching import Observation
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Heartbeat

NOBODY, METRICS, TOP = "nobody", "metrics, scraped every second", "chaoskit top"
_TURNS = (NOBODY, METRICS, NOBODY, TOP)
_TURN_S, _SCRAPE_S, _SETTLED_STEPS = 4.0, 1.0, 10
#: A step that is watched may take so many times one that is not.
RATIO_MAX = 1.05
_LIMIT_S = 150.0

NOTE = """Medians of the steps that lie within a turn of each watcher, in one run of two ranks that keep two cores busy:
each watcher takes its CPU time from them. The launcher reads the journals only while somebody scrapes; Prometheus
usually does so every 10 to 60 s. `chaoskit top` draws into a terminal of its own; its start and its first look are left
out, and in its turns it also reads what was written while it was stopped. CPU time is of one core."""


class Watchers:
    """Observers that take turns on a thread of their own, from the start of training to its end.

    Attributes:
        turns: observer, begin and end in ns, CPU seconds of the launcher and of ``chaoskit top``.
    """

    def __init__(self, directory: Path, turn_s: float) -> None:
        self.turns: list[tuple[str, int, int, float, float]] = []
        self._observation = Observation(directory, metrics_port=0)
        self._directory, self._turn_s = directory, turn_s
        self._going, self._over = threading.Event(), threading.Event()
        self._now = NOBODY
        self._thread = threading.Thread(target=self._take_turns, daemon=True)

    def __enter__(self) -> Watchers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._going.set()
        self._thread.join()
        self._observation.__exit__(None, None, None)

    def take_message(self, message: Any) -> None:
        """Take a message of the coordinator."""
        if isinstance(message, Heartbeat) and any(
            beat.step > _SETTLED_STEPS for beat in message.beats
        ):
            self._going.set()
        if self._now == METRICS:
            self._observation.watch(message)

    def _take_turns(self) -> None:
        self._going.wait()
        terminal, ours = pty.openpty()
        command = [sys.executable, "-m", "chaoskit", "top", str(self._directory)]
        viewer = subprocess.Popen(command, stdin=ours, stdout=ours, stderr=ours)
        os.close(ours)
        drain = threading.Thread(target=_drain, args=(terminal,), daemon=True)
        try:
            os.read(terminal, 1)  # its first picture
            drain.start()
            viewer.send_signal(signal.SIGSTOP)
            for observer in itertools.cycle(_TURNS):
                if self._over.is_set():
                    return
                self._take_turn(observer, viewer)
        finally:
            viewer.kill()
            viewer.wait()
            os.close(terminal)

    def _take_turn(self, observer: str, viewer: subprocess.Popen[bytes]) -> None:
        self._now = observer
        begun_ns, begun_s, viewer_s = (
            time.monotonic_ns(),
            time.process_time(),
            _cpu_seconds(viewer.pid),
        )
        if observer == TOP:
            viewer.send_signal(signal.SIGCONT)
        until_s = time.monotonic() + self._turn_s
        while (left_s := until_s - time.monotonic()) > 0 and not self._over.is_set():
            if observer == METRICS:
                with urllib.request.urlopen(
                    self._observation.metrics_url, timeout=_LIMIT_S
                ) as answer:
                    answer.read()
            self._over.wait(min(left_s, _SCRAPE_S))
        if observer == TOP:
            viewer.send_signal(signal.SIGSTOP)
        spent = (time.process_time() - begun_s, _cpu_seconds(viewer.pid) - viewer_s)
        self.turns.append((observer, begun_ns, time.monotonic_ns(), *spent))


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        return  # closed


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steps_of(
    records: list[Record], turns: list[tuple[str, int, int, float, float]]
) -> dict[str, list[float]]:
    """Return the seconds of the steps within the turns of each observer."""
    ends = [
        record.t_ns for record in records if record.event == Event.COMMIT and record["rank"] == 0
    ]
    seconds: dict[str, list[float]] = {observer: [] for observer in dict.fromkeys(_TURNS)}
    for begin, end in itertools.pairwise(ends):
        for observer, begun_ns, ended_ns, *_ in turns:
            if begun_ns <= begin and end <= ended_ns:
                seconds[observer].append((end - begin) / 1e9)
    return seconds


def measure(directory: Path, steps: int, turn_s: float, *, smoke: bool) -> list[Bar]:
    """Run the job with the observers in turns, and return the bars."""
    with (
        Lab(smoke=smoke, directory=directory) as lab,
        Watchers(directory / "watched-1", turn_s) as watchers,
    ):
        run, _ = lab.watch(
            watchers.take_message, steps=steps, size=lab.size, twin=False, nodes=2, spares=0
        )
    times = steps_of(run.records, watchers.turns)
    cpu = {observer: _share(watchers.turns, observer) for observer in times}
    base_s = median(times[NOBODY] or [0.0])
    bars = []
    for observer in (METRICS, TOP):
        ratio = median(times[observer]) / base_s if times[observer] and base_s else 0.0
        launcher, viewer = (
            observed_s - unobserved_s
            for observed_s, unobserved_s in zip(cpu[observer], cpu[NOBODY], strict=True)
        )
        bars.append(
            Bar(
                topic="observing",
                name=f"{observer}: a step, of one that nobody watches",
                measured=f"{ratio:.3f} x ({len(times[observer])} steps); {100 * (launcher + viewer):.2f} % of a core",
                limit=f"at most {RATIO_MAX:g} x",
                met=0 < ratio <= RATIO_MAX,
                samples={"steps_s": times[observer], "cpu": cpu[observer]},
            )
        )
    measured = "; ".join(
        f"{observer}: {spread(seconds)}" for observer, seconds in times.items() if seconds
    )
    name, samples = "a step", {"steps_s": times[NOBODY], "cpu": cpu[NOBODY]}
    return [*bars, Bar(topic="observing", name=name, measured=measured, samples=samples)]


def _share(turns: list[tuple[str, int, int, float, float]], observer: str) -> tuple[float, float]:
    """Return the CPU seconds a second of the launcher and of ``chaoskit top`` in the turns of an
    observer.
    """
    own_turns = [turn for turn in turns if turn[0] == observer]
    lasted_s = sum(ended_ns - begun_ns for _, begun_ns, ended_ns, *_ in own_turns) / 1e9 or 1.0
    return sum(turn[3] for turn in own_turns) / lasted_s, sum(
        turn[4] for turn in own_turns
    ) / lasted_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: few steps, no claims")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    machine = look_at_machine()
    show_progress("one run, in which the watchers take turns")
    with tempfile.TemporaryDirectory() as directory:
        steps, turn_s = (200, 1.0) if options.quick else (options.steps, _TURN_S)
        bars = measure(Path(directory), steps, turn_s, smoke=options.quick)
    report = Report(machine=machine, smoke=options.quick, bars=bars, notes=[NOTE])
    save(report, options.results, "observing")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
