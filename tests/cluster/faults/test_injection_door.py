"""A run without injected faults takes no order to inject one, even from a client that has its
token.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import LIMIT_S, wait_until

from chaoskit.config import DETECTION, RunConfig
from chaoskit.experiment.injection.channel import NAME
from chaoskit.job import resolve_job
from chaoskit.substrate.cluster.job_cluster import JobCluster
from chaoskit.substrate.local import LocalSubstrate
from chaoskit.wire import frames
from chaoskit.wire.messages import (
    ArmTriggers,
    AskThread,
    DaemonAct,
    InjectionAct,
    Message,
    ObserverHello,
    Resume,
    Trigger,
)

JOB = """
import sys
from pathlib import Path

import torch

def train(trainer, *, steps):
    model = torch.nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(torch.ones(8, 4), batch_size=4):
                step.backward(model(shard.batch).square().mean())
        part = trainer.disk / f"part-{trainer.rank}"
        part.write_text("\\n".join(sys.modules))
        part.rename(trainer.disk / f"loaded-{trainer.rank}")
"""
ORDERS: list[Message] = [
    ArmTriggers((Trigger("fault0", -1, -1, "forward"),)),
    Resume("fault0", InjectionAct("exit", {"status": 1})),
    DaemonAct(
        "fault0", InjectionAct("lose_copies", {"worker": "node0.0", "tiers": ["memory"], "step": 1})
    ),
    AskThread(1),
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobCluster]:
    """Return a job as ``chaoskit launch`` starts it."""
    directory = tmp_path_factory.mktemp("production")
    (directory / "job.py").write_text(JOB)
    config = RunConfig(
        job=resolve_job(str(directory / "job.py"), {"steps": 10**6}),
        nodes=2,
        **DETECTION["relaxed"],
    )
    substrate = LocalSubstrate()
    cluster = substrate.launch(config, directory / "run")
    yield cluster
    cluster.end()
    substrate.close()


def loaded(cluster: JobCluster) -> set[str]:
    """Return the modules of a worker that has committed steps."""
    path = cluster.disk("node0") / "loaded-0"
    wait_until(path.exists, "the first step")
    return set(path.read_text().split())


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_no_order_is_taken(launched: JobCluster, order: Message) -> None:
    """The connection is closed, the coordinator's log has the reason, and the job trains on."""
    loaded(launched)
    with frames.connect(launched.address, launched.token, LIMIT_S) as client:
        client.settimeout(LIMIT_S)
        frames.send(client, ObserverHello())
        frames.send(client, order)
        until_closed(client)
    log = launched.run_directory / "log" / "coordinator.log"
    wait_until(lambda: "refused a connection" in log.read_text(), "the reason")
    (launched.disk("node0") / "loaded-0").unlink(missing_ok=True)
    loaded(launched)


def until_closed(client: socket.socket) -> None:
    """Read the observer's messages until the other side closes.

    Raises:
        TimeoutError: if it does not close.
    """
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        pass


def test_none_of_its_sockets_takes_orders_of_faults(launched: JobCluster) -> None:
    """The socket for injections is neither in the run's directory nor open in one of its processes."""
    loaded(launched)
    assert not (launched.run_directory / NAME).exists()
    pids = [process.pid for node in launched.nodes for process in launched.node(node)]
    open_files = {
        os.readlink(link)
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink()
    }
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = {
        words[7] for words in sockets if len(words) > 7 and f"socket:[{words[6]}]" in open_files
    }
    assert not [path for path in named if path.endswith(NAME)]
    assert len(open_files) > len(pids), "their descriptors could be read"


def test_the_acts_of_faults_are_not_in_its_workers(launched: JobCluster) -> None:
    """The code of acts that a worker could do to itself is not loaded."""
    modules = loaded(launched)
    assert "chaoskit.runtime.step.hooks" in modules
    acts = {name for name in modules if name.startswith("chaoskit.runtime.injection.")}
    assert acts == {"chaoskit.runtime.injection.context"}, (
        "the empty context of acts is loaded, and no act"
    )


def test_the_harness_of_an_experiment_loads_them(chaos: object, tmp_path: Path) -> None:
    """A run of the job with a fault that acts in the worker loads the acts, so the test above is no
    empty check.
    """
    from chaoskit import Chaos
    from faults import NaN

    assert isinstance(chaos, Chaos)
    (tmp_path / "job.py").write_text(JOB)
    fault = NaN(rank=0, at_step=3, parameter="weight")
    outcome = chaos.run(str(tmp_path / "job.py"), nodes=2, steps=12, faults=[fault], twin=False)
    listed = (Path(outcome.directory) / "disk").rglob("loaded-*")
    assert any("chaoskit.runtime.injection.acts" in path.read_text() for path in listed)
