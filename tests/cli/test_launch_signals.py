"""Signals to a launch: it finishes the step, stores it, ends all processes and prints how to
resume.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli.test_cli import LIMIT_S, Workplace
from support.waiting import wait_until

from chaoskit.checkpoint import DiskTier
from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.requests import Requests
from chaoskit.job import JobSpec
from chaoskit.launcher.notice import notice_signals
from chaoskit.process.linux import descendants
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import Beat, Halt, Heartbeat, Welcome

ENDLESS = 1_000_000
SHARDED = """
import time
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def train(trainer, *, steps: int = 40, pause: float = 0.0):
    torch.manual_seed(trainer.seed)
    data = torch.linspace(0, 1, 64).unsqueeze(1).expand(-1, 8).contiguous()
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=trainer.mesh())
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=8):
                time.sleep(pause)
                step.backward(((model(shard.batch) - 3 * shard.batch) ** 2).mean())
"""

#: Steps are taken until there is a file ``stand`` beside it; then one takes for ever, or raises if there is ``fail``.
STANDING = """
import time
from pathlib import Path

import torch
from torch import nn

STAND, FAIL = Path(__file__).with_name("stand"), Path(__file__).with_name("fail")


def train(trainer, *, steps: int = 40, pause: float = 0.0):
    if FAIL.exists():
        raise ValueError("the data are unreadable")
    torch.manual_seed(trainer.seed)
    data = torch.linspace(0, 1, 64).unsqueeze(1)
    model = nn.Linear(1, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=8):
                while STAND.exists() and not FAIL.exists():
                    time.sleep(0.01)
                if FAIL.exists():
                    raise ValueError("the data are unreadable")
                time.sleep(pause)
                step.backward(((model(shard.batch) - 3 * shard.batch) ** 2).mean())
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    place = Workplace(tmp_path, tmp_path / "cache")
    yield place
    for pid in place.processes():
        os.kill(pid, signal.SIGKILL)


class Launch:
    """A launch of a job that would train for hours, after it has committed three steps."""

    def __init__(
        self,
        workplace: Workplace,
        *more: str,
        script: str = "train.py",
        pause_s: float = 0.01,
        at_hangup: signal.Handlers = signal.SIG_DFL,
    ) -> None:
        self.workplace = workplace
        options = ["--nodes", "2", "--spares", "0", "--report", "run", "--set", f"steps={ENDLESS}"]
        self.process = workplace.start(
            *("launch", script, *options, "--set", f"pause={pause_s}", *more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, at_hangup),
        )

    def await_training(self) -> None:
        wait_until(lambda: self.workplace.commits("run") > 2, "the first steps", limit_s=LIMIT_S)

    def await_line(self, text: str) -> None:
        """Read the output until a line contains ``text``."""
        assert self.process.stdout is not None
        assert any(text in line for line in iter(self.process.stdout.readline, "")), (
            f"never printed: {text}"
        )

    @contextmanager
    def stopped_agent(self, node: str, seconds: float) -> Iterator[None]:
        """Stop the agent of a node for ``seconds`` from the entry of the block on: its rank gets
        orders late.
        """
        processes = {
            Path(f"/proc/{pid}/comm").read_text().strip(): pid
            for pid in descendants(self.process.pid)
        }
        agent = processes[f"ck-{node}"]
        os.kill(agent, signal.SIGSTOP)
        timer = threading.Timer(seconds, os.kill, (agent, signal.SIGCONT))
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def end(self) -> str:
        """Wait until no process is left, and return all output."""
        printed, _ = self.process.communicate(timeout=LIMIT_S)
        self.workplace.await_silence()
        return str(printed)

    def committed(self) -> list[int]:
        """Return the last committed step of each rank."""
        steps: dict[str, int] = {}
        for path in (self.workplace.directory / "run" / "journal").glob("node*.*.jsonl"):
            for record in self.workplace.records("run", path.stem):
                if record["event"] == "commit":
                    steps[path.stem] = record["step"] + 1
        return sorted(steps.values())


def resumed(workplace: Workplace, printed: str, steps: int) -> dict[str, Any]:
    """Run the command that a launch has printed, for some steps more; return its result."""
    (line,) = [line for line in printed.splitlines() if line.startswith("to resume from step")]
    command = shlex.split(line.partition(": ")[2])
    assert command[:2] == ["chaoskit", "launch"]
    done = workplace.run(
        *[word.replace(str(ENDLESS), str(steps)) for word in command[1:]], "--json"
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.promise(
    "the launcher finishes the step, stores it where there is a tier, ends all processes, and prints the command that "
    "goes on",
    signum=signal.SIGTERM,
)
@pytest.mark.costly
@pytest.mark.parametrize(
    ("signum", "to_group"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, False, marks=pytest.mark.slow),
        (signal.SIGUSR1, True),
        pytest.param(signal.SIGHUP, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stores_the_last_step_and_says_how_to_go_on(
    workplace: Workplace, signum: signal.Signals, to_group: bool
) -> None:
    launch = Launch(workplace, "--checkpoints", "kept", "--checkpoint-every", "100000")
    launch.await_training()
    if to_group:
        os.killpg(launch.process.pid, signum)
    else:
        launch.process.send_signal(signum)
    printed = launch.end()
    assert launch.process.returncode == 128 + signum, printed
    last, other = launch.committed()
    assert last == other, "the ranks ended at different steps"
    (snapshot,) = DiskTier(workplace.directory / "kept").snapshots().snapshots
    assert snapshot.manifest.step == last
    assert f"training stopped: by {signum.name} after {last} steps" in printed
    assert "Traceback" not in printed
    result = resumed(workplace, printed, last + 5)
    assert (result["resumed_from"], result["steps"]) == (last, last + 5)


@pytest.mark.slow
@pytest.mark.costly
def test_a_sharded_job_stores_its_last_step(workplace: Workplace) -> None:
    (workplace.directory / "sharded.py").write_text(SHARDED)
    launch = Launch(
        workplace, "--checkpoints", "kept", "--checkpoint-every", "100000", script="sharded.py"
    )
    launch.await_training()
    with launch.stopped_agent("node1", 0.5):
        launch.process.send_signal(signal.SIGTERM)
    printed = launch.end()
    assert launch.process.returncode == 128 + signal.SIGTERM, printed
    last, other = launch.committed()
    assert last == other, "the ranks ended at different steps"
    plans = [
        record for record in workplace.records("run", "coordinator") if record["event"] == "plan"
    ]
    assert len(plans) == 1, (
        "the ranks left the train function behind different steps, and had to begin anew"
    )
    assert [
        snapshot.manifest.step
        for snapshot in DiskTier(workplace.directory / "kept").snapshots().snapshots
    ] == [last]
    assert resumed(workplace, printed, last + 3)["resumed_from"] == last


@pytest.mark.costly
def test_without_a_tier_the_step_is_finished_and_everything_ends(workplace: Workplace) -> None:
    launch = Launch(workplace, "--json")
    launch.await_training()
    launch.process.send_signal(signal.SIGTERM)
    printed = launch.end()
    assert launch.process.returncode == 128 + signal.SIGTERM, printed
    result = json.loads(printed.splitlines()[-1])
    assert (result["ok"], result["stopped_by"]) == (False, "SIGTERM")
    assert launch.committed() == [result["steps"]] * 2
    assert "nothing is stored: no directory for snapshots was given" in printed


@pytest.mark.costly
def test_a_chosen_signal_is_a_notice_too(workplace: Workplace) -> None:
    """A scheduler may announce the end by any signal; a user may want Ctrl-C to store the step."""
    launch = Launch(
        workplace, "--checkpoints", "kept", "--notice-signal", "USR2", "--notice-signal", "SIGINT"
    )
    launch.await_training()
    launch.process.send_signal(signal.SIGUSR2)
    printed = launch.end()
    assert launch.process.returncode == 128 + signal.SIGUSR2, printed
    assert (
        max(
            snapshot.manifest.step
            for snapshot in DiskTier(workplace.directory / "kept").snapshots().snapshots
        )
        == (launch.committed()[-1])
    )


@pytest.mark.costly
def test_a_second_signal_ends_at_once(workplace: Workplace) -> None:
    """A step that takes minutes is not waited for when a second signal comes."""
    (workplace.directory / "standing.py").write_text(STANDING)
    launch = Launch(workplace, "--checkpoints", "kept", "--grace", "600", script="standing.py")
    launch.await_training()
    (workplace.directory / "stand").touch()
    launch.process.send_signal(signal.SIGUSR1)
    launch.await_line("SIGUSR1: the step is finished")
    launch.process.send_signal(signal.SIGTERM)
    printed = launch.end()
    assert launch.process.returncode == 128 + signal.SIGTERM, printed
    assert "ended by SIGTERM; everything that this command had started was ended" in printed


@pytest.mark.costly
def test_a_step_that_does_not_end_within_the_grace_is_given_up(workplace: Workplace) -> None:
    """The launch names the newest step that is stored by then."""
    (workplace.directory / "standing.py").write_text(STANDING)
    options = ("--checkpoints", "kept", "--checkpoint-every", "2", "--grace", "3")
    launch = Launch(workplace, *options, script="standing.py")
    root = workplace.directory / "kept"
    wait_until(lambda: DiskTier(root).snapshots().snapshots, "the first snapshot", limit_s=LIMIT_S)
    (workplace.directory / "stand").touch()
    launch.process.send_signal(signal.SIGTERM)
    printed = launch.end()
    assert launch.process.returncode == 128 + signal.SIGTERM, printed
    newest = DiskTier(root).snapshots().snapshots[0].manifest.step
    assert f"to resume from step {newest}: chaoskit launch standing.py" in printed


@pytest.mark.costly
def test_a_step_that_never_ends_loses_no_step_before_it(workplace: Workplace) -> None:
    """The newest committed state is stored while the ranks hang in the next step."""
    (workplace.directory / "standing.py").write_text(STANDING)
    options = ("--checkpoints", "kept", "--checkpoint-every", "100000", "--grace", "4")
    launch = Launch(workplace, *options, script="standing.py")
    launch.await_training()
    (workplace.directory / "stand").touch()
    launch.process.send_signal(signal.SIGTERM)
    printed = launch.end()
    assert launch.process.returncode == 128 + signal.SIGTERM, printed
    last, other = launch.committed()
    assert last == other
    (snapshot,) = DiskTier(workplace.directory / "kept").snapshots().snapshots
    assert snapshot.manifest.step == last
    assert f"to resume from step {last}: chaoskit launch standing.py" in printed
    (workplace.directory / "stand").unlink()
    assert resumed(workplace, printed, last + 2)["resumed_from"] == last


@pytest.mark.slow
@pytest.mark.costly
def test_a_step_of_a_sharded_job_that_never_ends_loses_no_step_before_it(
    workplace: Workplace,
) -> None:
    pause = "                time.sleep(pause)\n"
    standing = (
        "                while Path(__file__).with_name('stand').exists(): time.sleep(0.01)\n"
    )
    script = "from pathlib import Path\n" + SHARDED.replace(pause, standing + pause)
    (workplace.directory / "sharded.py").write_text(script)
    options = ("--checkpoints", "kept", "--checkpoint-every", "100000", "--grace", "4")
    launch = Launch(workplace, *options, script="sharded.py", pause_s=0.1)
    launch.await_training()
    (workplace.directory / "stand").touch()
    launch.process.send_signal(signal.SIGTERM)
    printed = launch.end()
    assert launch.process.returncode == 128 + signal.SIGTERM, printed
    (snapshot,) = DiskTier(workplace.directory / "kept").snapshots().snapshots
    assert [snapshot.manifest.step] * 2 == launch.committed()


@pytest.mark.costly
def test_a_launch_under_nohup_ignores_a_closed_terminal(workplace: Workplace) -> None:
    launch = Launch(workplace, "--checkpoints", "kept", at_hangup=signal.SIG_IGN)
    launch.await_training()
    launch.process.send_signal(signal.SIGHUP)
    launch.process.send_signal(signal.SIGTERM)
    printed = launch.end()
    assert "training stopped: by SIGTERM" in printed
    assert launch.process.returncode == 128 + signal.SIGTERM


@pytest.mark.costly
def test_a_script_that_fails_after_a_notice_has_failed(workplace: Workplace) -> None:
    (workplace.directory / "standing.py").write_text(STANDING)
    launch = Launch(workplace, "--checkpoints", "kept", "--grace", "600", script="standing.py")
    launch.await_training()
    (workplace.directory / "stand").touch()
    launch.process.send_signal(signal.SIGTERM)
    launch.await_line("SIGTERM: the step is finished")
    (workplace.directory / "fail").touch()
    printed = launch.end()
    assert launch.process.returncode == 1, printed
    assert "training failed: " in printed
    assert "ValueError: the data are unreadable" in printed
    assert "training stopped" not in printed


@pytest.mark.costly
def test_a_notice_before_the_first_step_ends_the_launch(workplace: Workplace) -> None:
    launch = Launch(workplace, "--checkpoints", "kept")
    launch.await_line("on 2 nodes: starting")
    launch.process.send_signal(signal.SIGTERM)
    printed = launch.end()
    assert launch.process.returncode == 128 + signal.SIGTERM, printed
    assert "training stopped: by SIGTERM" in printed


@pytest.mark.slow
@pytest.mark.costly
def test_a_terminal_that_is_closed_stores_the_last_step(workplace: Workplace) -> None:
    """The launcher of a closed terminal gets SIGHUP, and can no longer print."""
    master, slave = os.openpty()
    options = ["--nodes", "2", "--spares", "0", "--report", "run", "--checkpoints", "kept"]
    launcher = workplace.start(
        *("launch", "train.py", *options, "--set", f"steps={ENDLESS}", "--set", "pause=0.01"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    wait_until(lambda: workplace.commits("run") > 2, "the first steps", limit_s=LIMIT_S)
    os.close(master)
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGHUP
    workplace.await_silence()
    assert DiskTier(workplace.directory / "kept").snapshots().snapshots


def test_a_notice_is_repeated_to_the_next_coordinator() -> None:
    """The order is lost with a coordinator. The next coordinator gets it once it knows a step."""
    config = RunConfig(job=JobSpec("job.py"))
    beat = Beat("node0.0", 1, 0, 7, Phase.FORWARD, age_ms=1.0, starved_ms=0.0, commits=7, loss=0.0)
    requests = Requests()
    requests.hear(Welcome(config, 1, 1))
    requests.halt("SIGTERM", 0.0)
    assert requests.take() == [Halt("SIGTERM")]
    requests.hear(Heartbeat("node0", (beat,)))
    assert requests.take() == []
    requests.hear(Welcome(config, 2, 2))
    requests.hear(Heartbeat("node0", ()))
    assert requests.take() == []
    requests.hear(Heartbeat("node0", (beat,)))
    requests.hear(Heartbeat("node0", (beat,)))
    assert requests.take() == [Halt("SIGTERM")]


@pytest.mark.parametrize("text", ["KILL", "SIGSTOP", "SIGALRM", "nonsense", "", "99"])
def test_a_signal_that_cannot_be_a_notice_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="SIGUSR2"):
        notice_signals([text])


def test_the_names_of_notice_signals() -> None:
    usual = {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    assert set(notice_signals([])) == usual
    assert set(notice_signals(["USR2", "sigint"])) == usual | {signal.SIGUSR2, signal.SIGINT}
