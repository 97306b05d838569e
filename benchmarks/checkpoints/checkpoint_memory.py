"""Measure the memory tiers:
``python -m benchmarks.checkpoints.checkpoint_memory [--smoke] [--output DIRECTORY]``.

Snapshots and restores from memory are compared with the plain operation that bounds them and with
torch's checkpoints. Copies go to another process through shared memory and over TCP. All kinds take
turns, so that other load affects all of them. Ratios are taken of measurements that are neighbours
in time.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import random
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import AdamW

from benchmarks.harness.bars import Bar, Report, look_at_machine, show, spread
from benchmarks.harness.results import RESULTS, save
from chaoskit.checkpoint.layout.held import HeldTensor
from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.checkpoint.memory.slots import Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.checkpoint.memory.stored import StoredCopy
from chaoskit.checkpoint.peer.protocol import PeerAddress
from chaoskit.checkpoint.peer.sender import CopySender
from chaoskit.checkpoint.peer.server import CopyServer
from chaoskit.fixtures.jobs.gpt import SIZES, build
from chaoskit.fixtures.jobs.gpt_model import next_byte_loss
from chaoskit.process.linux import die_with_parent

TOKEN = "benchmark"
TENSOR_BYTES = 2**21
Timing = Callable[[], float]


def make_state(size_bytes: int) -> list[HeldTensor]:
    """Return tensors of 2 MiB, like those of a small transformer."""
    count = max(1, size_bytes // TENSOR_BYTES)
    return [HeldTensor(f"t{number}", torch.randn(TENSOR_BYTES // 4)) for number in range(count)]


def timed(act: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s


def take_turns(kinds: dict[str, Timing], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every kind.

    Each round has another order. The first two rounds are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in kinds}
    order = random.Random(0)
    for repeat in range(-2, repeats):
        for name in order.sample(list(kinds), len(kinds)):
            seconds = kinds[name]()
            if repeat >= 0:
                times[name].append(seconds)
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> float:
    """Return the median ratio of ``name`` to ``to`` over measurements that are neighbours in
    time.
    """
    return median(duration / other for duration, other in zip(times[name], times[to], strict=True))


# -- the other node --------------------------------------------------------------------------------


class OtherNode:
    """A process with a copy server, which stands for another node."""

    def __init__(self) -> None:
        self._line, child_line = socket.socketpair()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(parent)
            try:
                self._serve(child_line)
            finally:
                os._exit(1)
        host_id, port = self._line.recv(1000).decode().split(" ")
        self.address = PeerAddress("other", host_id, "127.0.0.1", int(port))

    def _serve(self, line: socket.socket) -> None:
        server = CopyServer("other", "127.0.0.1", TOKEN, 2**33, niceness=0)
        line.sendall(f"{server.address.host_id} {server.address.port}".encode())
        line.recv(1)  # until this process is killed

    def close(self) -> None:
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Provide a directory in shared memory, so that torch's checkpoints need no disk."""
    with tempfile.TemporaryDirectory(prefix="chaoskit-bench-", dir="/dev/shm") as directory:
        yield Path(directory)


# -- one size --------------------------------------------------------------------------------------


class Sizes:
    """All measurements of a state of one size."""

    def __init__(self, size_bytes: int, repeats: int, other: OtherNode, directory: Path) -> None:
        self.tensors = make_state(size_bytes)
        self.size_bytes = sum(held.tensor.nbytes for held in self.tensors)
        self._repeats, self._other, self._directory = repeats, other, directory
        self._flat, self._flat_target = (
            torch.randn(self.size_bytes // 4),
            torch.zeros(self.size_bytes // 4),
        )
        self._sealed: SimpleQueue[Seal] = SimpleQueue()
        self._step = 0
        self._piece = f"piece of {size_bytes} bytes"
        self.snapshotter = Snapshotter(
            Slots(), self.tensors, lambda: b"x", on_sealed=self._sealed.put
        )

    def plain_copy(self) -> float:
        """Return the seconds of a ``copy_`` between two blocks of memory that were touched
        before.
        """
        return timed(lambda: self._flat_target.copy_(self._flat))

    def snapshots(self) -> dict[str, list[float]]:
        kinds = {
            "plain": self.plain_copy,
            "snapshot": self._snapshot,
            "back to back": self._back_to_back,
        }
        times = take_turns(kinds, self._repeats)
        times |= take_turns({"dcp.async_save": self._async_save}, min(3, self._repeats))
        return times

    def _snapshot(self) -> float:
        """Return the seconds that training waits for a snapshot; its digest is computed in the
        background.
        """
        self._step += 1
        stall_s = timed(lambda: (self.snapshotter.begin(self._step), self.snapshotter.wait()))
        self._sealed.get(timeout=60)
        return stall_s

    def _back_to_back(self) -> float:
        """Return the mean stall of three snapshots without any compute between them."""
        stall_s = 0.0
        for _ in range(3):
            self._step += 1
            self.snapshotter.begin(self._step)
            stall_s += self.snapshotter.wait().stall_s
        for _ in range(3):
            self._sealed.get(timeout=60)
        return stall_s / 3

    def _async_save(self) -> float:
        started_s = time.perf_counter()
        future: Any = dcp.async_save(
            self._named(self.tensors), checkpoint_id=str(self._directory / "async")
        )
        stall_s = time.perf_counter() - started_s
        future.result()
        shutil.rmtree(self._directory / "async")
        return stall_s

    def restores(self) -> dict[str, list[float]]:
        target = make_state(self.size_bytes)
        path, _ = self.snapshotter.slots.complete()[0]
        saved = self._directory / "saved"
        dcp.save(self._named(self.tensors), checkpoint_id=str(saved))

        def from_memory() -> None:
            with StoredCopy(path) as copy:
                copy.read_into(target)

        kinds = {
            "plain": self.plain_copy,
            "memory": lambda: timed(from_memory),
            "dcp.load": lambda: timed(
                lambda: dcp.load(self._named(target), checkpoint_id=str(saved))
            ),
        }
        times = take_turns(kinds, self._repeats)
        shutil.rmtree(saved)
        return times

    @staticmethod
    def _named(tensors: list[HeldTensor]) -> dict[str, Tensor]:
        return {held.path: held.tensor for held in tensors}

    def to_peer(self) -> dict[str, list[float]]:
        """Return the seconds from a sealed snapshot to the acknowledgement of a partner, by
        transport.
        """
        times = {}
        for transport in ("auto", "tcp"):
            there: SimpleQueue[Seal] = SimpleQueue()
            sender = CopySender(
                f"{self._piece} over {transport}",
                self.snapshotter.slots.paths,
                [self._other.address],
                TOKEN,
                transport=transport,
                on_acknowledged=lambda node, seal, there=there: there.put(seal),
                niceness=0,
            )
            there.get(timeout=60)
            times[transport] = [self._replicate(sender, there) for _ in range(self._repeats)][2:]
            sender.close()
        return times

    def _replicate(self, sender: CopySender, there: SimpleQueue[Seal]) -> float:
        self._snapshot()
        return timed(lambda: (sender.notify(), there.get(timeout=60)))

    def close(self) -> None:
        self.snapshotter.close()


# -- training --------------------------------------------------------------------------------------


def training(steps: int, size: str, directory: Path) -> dict[str, list[float]]:
    """Return the seconds of steps without and with snapshots, and of the stalls, of a GPT on one
    rank.
    """
    shape = SIZES[size]
    torch.manual_seed(0)
    model = build(shape, dropout=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(0, 256, (shape.batch, shape.context + 1))

    def compute() -> None:
        optimizer.zero_grad()
        next_byte_loss(model, batch).backward()

    for _ in range(3):
        compute()
        optimizer.step()
    tensors = [HeldTensor(name, parameter) for name, parameter in model.named_parameters()]
    for number, state in enumerate(optimizer.state.values()):
        tensors += [
            HeldTensor(f"optimizer.{number}.{name}", tensor) for name, tensor in state.items()
        ]
    snapshotter = Snapshotter(Slots(), tensors, check_finite=True)
    times: dict[str, list[float]] = {
        "plain step": [],
        "step": [],
        "stall": [],
        "dcp.async_save": [],
    }

    def step_with_snapshot(step: int) -> float:
        compute()
        stall_s = snapshotter.wait().stall_s
        optimizer.step()
        snapshotter.begin(step)
        return stall_s

    for block in range(steps // 10):  # in turns, ten steps each
        for _ in range(10):
            times["plain step"].append(timed(lambda: (compute(), optimizer.step())))
        for number in range(10):
            started_s = time.perf_counter()
            stall_s = step_with_snapshot(block * 10 + number)
            times["step"].append(time.perf_counter() - started_s)
            if number:  # the first step has no snapshot to wait for
                times["stall"].append(stall_s)
        snapshotter.wait()
    named = {held.path: held.tensor for held in tensors}
    for _ in range(5):
        started_s = time.perf_counter()
        future: Any = dcp.async_save(named, checkpoint_id=str(directory / "training"))
        times["dcp.async_save"].append(time.perf_counter() - started_s)
        compute()
        future.result()
        shutil.rmtree(directory / "training")
    del times["dcp.async_save"][0]
    snapshotter.close()
    return times


# -- what it says ----------------------------------------------------------------------------------


def size_bars(label: str, size: Sizes) -> list[Bar]:
    """Return all bars of one size."""
    snapshots, restores, sent = size.snapshots(), size.restores(), size.to_peer()
    megabytes = size.size_bytes / 1e6

    def bar(
        topic: str, name: str, times: dict[str, list[float]], kind: str, limit: float = 0.0
    ) -> Bar:
        factor = ratio(times, kind, "plain") if limit else 0.0
        beside = f"; {factor:.2f} x {median(times['plain']) * 1e3:.0f} ms" if limit else ""
        return Bar(
            topic=topic,
            name=f"{label}: {name}",
            measured=f"{spread(times[kind])}{beside}",
            limit=f"{limit:.1f} x a plain copy" if limit else "",
            met=factor <= limit if limit else None,
            samples={"megabytes": megabytes, **times},
        )

    faster = median(restores["dcp.load"]) / median(restores["memory"])
    return [
        bar("snapshot", "stall of a snapshot that no compute hides", snapshots, "snapshot", 1.2),
        bar("snapshot", "the same, back to back", snapshots, "back to back", 1.2),
        bar("snapshot", "stall of dcp.async_save", snapshots, "dcp.async_save"),
        bar("restore", "restore from memory, verified", restores, "memory", 1.5),
        Bar(
            topic="restore",
            name=f"{label}: dcp.load from the page cache",
            measured=f"{spread(restores['dcp.load'])}; ours is {faster:.1f} x faster",
            limit="3 x faster",
            met=faster >= 3,
        ),
        bar("peer", "from seal to acknowledgement through shared memory", sent, "auto"),
        bar("peer", "from seal to acknowledgement over TCP", sent, "tcp"),
    ]


def training_bars(times: dict[str, list[float]]) -> list[Bar]:
    share = median(times["stall"]) / median(times["plain step"])
    slower = median(times["step"]) / median(times["plain step"]) - 1
    return [
        Bar(
            topic="training",
            name="gpt 10M on one rank, a snapshot each step: stall",
            measured=f"{median(times['stall']) * 1e3:.2f} ms, {share:.2%} of {spread(times['plain step'])}",
            limit="1 % of a step",
            met=share <= 0.01,
            samples=times,
        ),
        Bar(
            topic="training",
            name="the whole step with snapshots",
            measured=f"{spread(times['step'])}, {slower:+.1%}",
        ),
        Bar(
            topic="training",
            name="stall of dcp.async_save in its place",
            measured=spread(times["dcp.async_save"]),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--smoke", action="store_true", help="show that everything works; no duration is claimed"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")
    machine = look_at_machine()
    torch.set_num_threads(1)
    other = OtherNode()  # before any thread is started
    sizes = (
        {"8 MB": (2**23, 3)}
        if options.smoke
        else {"100 MB": (100 * 2**20, 25), "1 GB": (1000 * 2**20, 9)}
    )
    bars: list[Bar] = []
    with scratch_directory() as directory:
        bars += training_bars(
            training(20 if options.smoke else 100, "tiny" if options.smoke else "10m", directory)
        )
        for label, (size_bytes, repeats) in sizes.items():
            size = Sizes(size_bytes, repeats, other, directory)
            bars += size_bars(label, size)
            size.close()
    other.close()
    note = (
        "Times are median / 95th percentile / maximum. A plain copy is one `copy_` between two flat blocks that were "
        "touched before; ratios are medians over neighbours in time. Every process has one torch thread."
    )
    report = Report(machine=machine, smoke=options.smoke, bars=bars, notes=[note])
    show(report)
    save(report, options.results, "checkpoint_memory")


if __name__ == "__main__":
    main()
