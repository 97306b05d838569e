"""The substrate docker: nodes are real containers, Docker's faults take effect, and no foreign
container is removed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from support.waiting import wait_until

from chaoskit.cli.machine import probes
from chaoskit.config import DETECTION, RunConfig
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput, HarnessError
from chaoskit.experiment.harness import Harness
from chaoskit.job import resolve_job
from chaoskit.journal import read_journals
from chaoskit.process import linux
from chaoskit.substrate.cluster.job_cluster import JobCluster
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core import commands
from chaoskit.substrate.core.actions import (
    Action,
    BreakDisk,
    CapCpu,
    CapMemory,
    CapPids,
    CapWrites,
    Freeze,
)
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.core.traffic import Change, Degrade, between
from chaoskit.substrate.docker import daemon as docker_daemon
from chaoskit.substrate.docker import image as docker_image
from chaoskit.substrate.docker.container import Container
from chaoskit.substrate.docker.image import Recipe, outermost, skeleton_archive
from chaoskit.substrate.docker.substrate import DockerSubstrate
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.limits.cgroup import find_place
from chaoskit.substrate.undo import ContainerEntry, RepairOutcome, UndoLog, sweep
from chaoskit.substrate.undo.docker_janitor import (
    HOST,
    OWNER,
    endpoint,
    labels,
    owner,
    remove_abandoned,
)
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import WorkerReady
from faults import Cut, Kill, Scale

ROOT = Path(__file__).parents[3]
TROUBLED = f"{ROOT / 'tests' / 'jobs' / 'failing' / 'troubled.py'}:plain"
WAIT_S = 120.0
RELAXED = DETECTION["relaxed"]  # as in all runs of the fixture ``chaos``
MIB = 2**20

# A launcher in the middle of a run; one of its two nodes is paused.
RUNNING = """
import sys
from pathlib import Path
from chaoskit.config import DETECTION, RunConfig
from chaoskit.job import resolve_job
from chaoskit.substrate.core.actions import Freeze
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.docker.substrate import DockerSubstrate

job = resolve_job(sys.argv[1], {"steps": 10**6, "step_s": 0.02})
substrate = DockerSubstrate()
config = RunConfig(job=job, nodes=2, spares=0, **DETECTION["relaxed"])
cluster = substrate.launch(config, Path(sys.argv[2]) / "001-run")
paused = cluster.apply("node1", Freeze())
assert paused.shown()
print(*(container.name for container in substrate.containers.values()), flush=True)
print(*(process.pid for node in cluster.nodes for process in cluster.node(node)), flush=True)
sys.stdin.read()
"""

# Takes memory, or starts processes, until it may not.
HOG = """
import sys
open("/proc/self/oom_score_adj", "w").write("1000")
hoard = [bytearray(b"x") * 2**20 for _ in range(int(sys.argv[1]))]
"""
BREED = """
import os, sys
for _ in range(int(sys.argv[1])):
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: sys.exit(7)
"""

needs_docker = pytest.mark.skipif(
    bool(docker_daemon.unavailable()), reason=docker_daemon.unavailable() or "possible here"
)


def test_ci_has_docker() -> None:
    """CI must have Docker, so that none of these tests is skipped unnoticed."""
    if os.environ.get("CI") != "true" or os.geteuid() != 0:
        pytest.skip("not on CI, or not as root")
    assert docker_daemon.unavailable() == ""


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    client = docker_daemon.connect()
    yield client
    client.close()


@pytest.fixture(scope="module")
def substrate() -> Iterator[DockerSubstrate]:
    substrate = DockerSubstrate()
    yield substrate
    names = [container.name for container in substrate.containers.values()]
    substrate.close()
    assert not set(names) & set(all_names())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that contains all runs, so that they share containers."""
    return tmp_path_factory.mktemp("runs")


def start(substrate: DockerSubstrate, runs: Path) -> JobCluster:
    """Start two nodes that train until they are stopped."""
    job = resolve_job(TROUBLED, {"steps": 10**6, "step_s": 0.02})
    config = RunConfig(job=job, nodes=2, spares=0, **RELAXED)
    return substrate.launch(config, runs / f"cluster{len(list(runs.glob('cluster*')))}")


@pytest.fixture
def cluster(substrate: DockerSubstrate, runs: Path) -> Iterator[JobCluster]:
    cluster = start(substrate, runs)
    yield cluster
    cluster.end()


def all_names() -> list[str]:
    client = docker_daemon.connect()
    try:
        return [
            container.name for container in client.containers.list(all=True, ignore_removed=True)
        ]
    finally:
        client.close()


def container_of(substrate: DockerSubstrate, station: str) -> Container:
    return substrate.containers[station]


def receive(cluster: JobCluster, matches: Callable[[Any], bool]) -> Any:
    """Return the first message that is wanted."""

    def next_match() -> Any:
        message = cluster.receive(1.0)
        return message if message is not None and matches(message) else None

    return wait_until(next_match, "the message", limit_s=WAIT_S)


def run_in(container: Container, code: str, *arguments: str) -> int:
    """Run Python code inside a container, and return its status.

    The end of its output, which may never come, is not waited for.
    """
    api = container.handle.client.api
    execution = api.exec_create(
        container.handle.id, [container.recipe.python, "-c", code, *arguments]
    )["Id"]
    api.exec_start(execution, detach=True)
    wait_until(
        lambda: not api.exec_inspect(execution)["Running"], "the end of the command", limit_s=WAIT_S
    )
    return int(api.exec_inspect(execution)["ExitCode"])


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [*get_args(Change), BreakDisk, CapWrites])
def test_containers_have_networks_and_disks_of_their_own(action: type[Action]) -> None:
    """Containers allow the changes to networks and directories that this machine allows."""
    substrate = DockerSubstrate()
    assert substrate.why_not(action) == capabilities.why_not(action)
    substrate.close()


@pytest.mark.parametrize("action", [Freeze, CapCpu, CapMemory, CapPids])
def test_docker_freezes_and_limits_for_any_user(action: type[Action]) -> None:
    """Docker's daemon writes to control groups that this user may not write to."""
    substrate = DockerSubstrate()
    assert substrate.why_not(action) == ""
    substrate.close()


def first_process(cluster: JobCluster, station: str) -> Process:
    return cluster.coordinator() if station == COORDINATOR else cluster.node(station)[0]


def named_process(cluster: JobCluster, station: str) -> Process:
    """Return the first process of a station when it has begun, and so has its name."""

    def found() -> Process | None:
        first = first_process(cluster, station)
        process = first.kernel.find(first.pid)
        return process if process.name == f"ck-{station}" else None

    process = wait_until(found, f"the process ck-{station}", limit_s=WAIT_S)
    assert process is not None
    return process


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("Every node is a container, and the coordinator another one.")
@needs_docker
def test_every_node_is_a_container(substrate: DockerSubstrate, cluster: JobCluster) -> None:
    """Each container is labelled, has a network and a group of its own, and few rights.

    Its processes have the same pids here.
    """
    namespaces, groups = set(), set()
    for station in (COORDINATOR, *cluster.nodes):
        container = container_of(substrate, station)
        container.handle.reload()
        assert container.handle.labels.items() >= labels().items()
        assert container.handle.attrs["HostConfig"]["CapDrop"] == ["ALL"]
        process = named_process(cluster, station)
        namespaces.add(os.readlink(f"/proc/{process.pid}/ns/net"))
        groups.add(Path(f"/proc/{process.pid}/cgroup").read_text())
        assert container.handle.id in Path(f"/proc/{process.pid}/cgroup").read_text()
    assert len(namespaces) == len(groups) == 3
    assert os.readlink("/proc/self/ns/net") not in namespaces
    assert cluster.round_trips_ms("node0", "node1")
    assert not run_in(container, f"open({str(ROOT / 'README.md')!r}).read()")
    assert run_in(container, f"open({str(ROOT / 'README.md')!r}, 'a')")


@pytest.mark.costly
@needs_docker
def test_containers_are_kept_warm_and_a_lost_one_is_replaced(
    substrate: DockerSubstrate, runs: Path
) -> None:
    """The next run uses the containers again, except one that has ended."""
    harness = Harness(substrate, runs)

    def run() -> dict[str, str]:
        outcome = harness.run(
            TROUBLED,
            nodes=2,
            steps=40,
            options={"step_s": 0.02},
            faults=[Kill(rank=1, at_step=9)],
            twin=False,
            **RELAXED,
        )
        assert (outcome.verdict, outcome.faults[0].state) == ("passed", "confirmed"), (
            outcome.reasons
        )
        return {name: container.handle.id for name, container in substrate.containers.items()}

    first = run()
    container_of(substrate, "node1").handle.kill()  # a kill from outside of the run
    second = run()
    harness.close()
    assert {name for name in first if first[name] != second[name]} == {"node1"}
    assert not container_of(substrate, "node1").cold


@pytest.mark.costly
@needs_docker
def test_a_world_grows_into_a_container(substrate: DockerSubstrate, runs: Path) -> None:
    """A world grows into a container that stood ready, in the same network, with the numbers of the
    unbroken run.
    """
    elastic = ElasticPolicy(min_replicas=2, max_replicas=3, scaling_timeout_s=0)
    options = {"step_s": 0.05}
    harness = Harness(substrate, runs)
    try:
        outcome = harness.run(
            TROUBLED,
            nodes=2,
            spares=0,
            steps=60,
            options=options,
            elastic=elastic,
            faults=[Scale(to=3, at_step=9)],
            **RELAXED,
        )
    finally:
        harness.close()
    assert (outcome.verdict, outcome.faults[0].state) == ("passed", "confirmed"), outcome.reasons
    assert outcome.lost_steps == 0
    journals = read_journals(Path(outcome.directory) / "journal")
    assert {
        record["world"]
        for record in journals
        if record.event == Event.COMMIT and record.source == "node2.0"
    } == {3}
    assert not container_of(substrate, "node2").cold


@pytest.mark.costly
@needs_docker
def test_a_node_that_is_provided_is_a_container_as_all_are(
    substrate: DockerSubstrate, runs: Path
) -> None:
    """A node that is added to a run is a container in its network; no more are added than were
    planned.
    """
    job = resolve_job(TROUBLED, {"steps": 10**6, "step_s": 0.02})
    elastic = ElasticPolicy(min_replicas=2, max_replicas=3)
    config = RunConfig(job=job, nodes=2, spares=0, elastic=elastic, **RELAXED)
    cluster = substrate.launch(config, runs / "provided")
    try:
        cluster.provide(2)
        assert cluster.nodes == ("node0", "node1")
        cluster.provide(3)
        receive(
            cluster, lambda message: isinstance(message, WorkerReady) and message.node == "node2"
        )
        container = container_of(substrate, "node2")
        for process in cluster.node("node2"):
            assert container.handle.id in Path(f"/proc/{process.pid}/cgroup").read_text()
        assert min(cluster.round_trips_ms("node0", "node2")) > 0
        with pytest.raises(
            HarnessError, match="made for 3 nodes, not for node3: raise maxReplicas"
        ):
            cluster.provide(4)
    finally:
        cluster.end()


@pytest.mark.costly
@needs_docker
def test_nothing_of_a_run_stays_in_the_network_of_a_container(
    substrate: DockerSubstrate, runs: Path
) -> None:
    """The link of an ended run, and the rules of a change that was not lifted, are removed from its
    containers.
    """
    if reason := capabilities.delays():
        pytest.skip(reason)
    cluster = start(substrate, runs)
    cluster.apply("node0", Degrade(ways=between(["node0"], ["node1"]), delay_ms=20))
    assert min(cluster.round_trips_ms("node0", "node1", 3)) > 30
    cluster.end()
    inside = ["nsenter", f"--net=/proc/{container_of(substrate, 'node1').pid}/ns/net"]
    shown = commands.call([*inside, "ip", "-o", "link"]).stdout.decode()
    assert len(shown.splitlines()) == 1, shown
    rules = commands.call(
        [*inside, "iptables", "--table", "mangle", "--list-rules", "PREROUTING"]
    ).stdout.decode()
    assert "NFQUEUE" not in rules


# -- what Docker does ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("A lost node is cut off first, and then killed by Docker")
@needs_docker
def test_a_lost_node_is_gone_at_once_and_another_one_takes_its_name(
    substrate: DockerSubstrate, cluster: JobCluster
) -> None:
    """A lost node has no process when the call returns, and another container takes its name."""
    receive(cluster, lambda message: isinstance(message, WorkerReady) and message.node == "node1")
    lost, processes = container_of(substrate, "node1"), cluster.node("node1")
    assert len(processes) >= 3
    cluster.lose("node1")
    assert cluster.node("node1") == []
    assert all(linux.is_ending(process.pid) for process in processes)
    assert (lost.state()["Status"], lost.state()["ExitCode"]) == ("exited", 128 + signal.SIGKILL)
    assert not cluster.round_trips_ms("node0", "node1", 1, 0.2)
    cluster.restart("node1")
    assert container_of(substrate, "node1").handle.id != lost.handle.id
    assert lost.name not in all_names()
    assert cluster.round_trips_ms("node0", "node1", 3)
    pid = cluster.node("node1")[0].pid
    assert pid != processes[0].pid
    record = cluster.run_directory / "coordinator.wal"
    joined = '"NodeJoined","node":"node1"'
    wait_until(
        lambda: record.read_text().count(joined) == 2, "the node that took the name", limit_s=WAIT_S
    )


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("A node is frozen by pausing, and limited by updating its container")
@needs_docker
def test_a_paused_node_stands_still_and_goes_on(
    substrate: DockerSubstrate, cluster: JobCluster
) -> None:
    """Processes of a paused node do not run, and no other run uses its container until it goes on."""
    container = container_of(substrate, "node1")
    frozen = cluster.apply("node1", Freeze())
    assert frozen.shown()
    assert container.state()["Paused"]
    agent = cluster.node("node1")[0]
    before = linux.switches(agent.pid, agent.pid)
    assert not container.is_usable()
    assert linux.switches(agent.pid, agent.pid) == before
    assert frozen.lift()
    assert not frozen.shown()
    assert not container.state()["Paused"]
    wait_until(lambda: linux.switches(agent.pid, agent.pid) != before, "the agent to go on")
    assert container.is_usable()


@pytest.mark.costly
@needs_docker
def test_a_paused_node_can_be_lost(cluster: JobCluster) -> None:
    """A node that is paused can be lost."""
    frozen = cluster.apply("node0", Freeze())
    cluster.lose("node0")
    assert frozen.lift()


@pytest.mark.costly
@needs_docker
def test_limits_bite_and_are_lifted(substrate: DockerSubstrate, cluster: JobCluster) -> None:
    """Limits of CPU, memory and processes strike, are counted, and end when they are lifted."""
    container = container_of(substrate, "node0")
    cpu = cluster.apply("node0", CapCpu(0.05))
    wait_until(lambda: cpu.shown() >= 3, "three throttled periods", limit_s=WAIT_S)
    assert cpu.lift()
    # A starting worker needs memory, too, and the kernel might end it instead.
    receive(cluster, lambda message: isinstance(message, WorkerReady) and message.node == "node0")
    memory = cluster.apply("node0", CapMemory(64 * MIB))
    pids = cluster.apply("node1", CapPids(32))  # runc itself needs some processes
    assert (memory.shown(), pids.shown()) == (0, 0)
    assert run_in(container, HOG, "256") == 128 + signal.SIGKILL
    assert memory.shown() >= 1
    assert run_in(container_of(substrate, "node1"), BREED, "64") == 7
    assert pids.shown() >= 1
    assert not container.is_usable(), "a node under a limit is good for no other run"
    assert memory.lift()
    assert pids.lift()
    counted = memory.shown()
    assert run_in(container, HOG, "256") == 0
    assert memory.shown() == counted
    assert run_in(container_of(substrate, "node1"), BREED, "64") == 0
    assert container.is_usable()


@pytest.mark.costly
@needs_docker
def test_docker_says_which_container_ran_out_of_memory(
    substrate: DockerSubstrate, cluster: JobCluster
) -> None:
    """A container ends with its first process, and with it the kernel's count of kills for memory."""
    container, agent = container_of(substrate, "node1"), cluster.node("node1")[0]
    receive(cluster, lambda message: isinstance(message, WorkerReady) and message.node == "node1")
    Path(f"/proc/{container.pid}/oom_score_adj").write_text("1000")
    limit = cluster.apply("node1", CapMemory(64 * MIB))
    container.handle.exec_run(
        [container.recipe.python, "-c", HOG.replace("1000", "0"), "256"], detach=True
    )
    wait_until(lambda: not container.lives(), "the end of the container", limit_s=WAIT_S)
    wait_until(
        lambda: container.state()["Status"] == "exited", "Docker to know of it", limit_s=WAIT_S
    )
    assert container.state()["OOMKilled"]
    assert limit.shown() >= 1
    assert limit.lift()
    assert linux.is_ending(agent.pid)


# -- leftovers of launchers ------------------------------------------------------------------------


@pytest.fixture
def idle(client: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that makes containers that never run, with the given labels."""
    image, made = docker_image.host_recipe(client).image, []

    def make(name: str = "", **marks: str) -> Any:
        named = {"name": name} if name else {}
        made.append(
            client.containers.create(image, ["true"], labels=marks, network_mode="none", **named)
        )
        return made[-1]

    yield make
    from docker.errors import NotFound

    for container in made:
        try:
            container.remove(force=True)
        except NotFound:
            pass


@needs_docker
def test_only_containers_of_launchers_that_are_gone_are_removed(idle: Callable[..., Any]) -> None:
    """A container is removed if it has chaoskit's labels and its launcher, on this machine, is
    gone.
    """
    gone = subprocess.Popen(["true"])
    ticks = linux.start_ticks(gone.pid)
    gone.wait()
    dead = f"{gone.pid}-{ticks}"
    ours = {**labels(), HOST: f"of {owner()}"}  # no other test uses this host
    abandoned = idle(f"chaoskit-{dead}-1-node0", **{**ours, OWNER: dead})
    kept = [
        idle(**ours),  # its launcher lives
        idle(f"chaoskit-{dead}-2-node0"),  # only the name is like ours
        idle(**{OWNER: dead, HOST: ours[HOST]}),  # without our label
        idle(**{**ours, OWNER: dead, HOST: "another machine"}),
        idle(**{**ours, OWNER: "somebody"}),
    ]
    assert remove_abandoned(endpoint(), ours[HOST]) == [abandoned.name]
    assert abandoned.name not in all_names()
    assert {container.name for container in kept} <= set(all_names())


@needs_docker
def test_an_entry_removes_only_what_bears_its_labels(idle: Callable[..., Any]) -> None:
    """A container that another tool has made under the same name stays."""
    foreign, other = idle(), idle(**{**labels(), OWNER: "1-1"})
    places = [
        (foreign.name, endpoint()),
        (other.name, endpoint()),
        ("chaoskit-never-made", endpoint()),
    ]
    entries = [ContainerEntry(name, owner(), daemon) for name, daemon in places]
    assert [removal.undo() for removal in entries] == [RepairOutcome.NOTHING_LEFT] * 3
    with pytest.raises(
        OSError, match="No such file"
    ):  # a daemon that is away may have the container still
        ContainerEntry(foreign.name, owner(), "/nowhere/docker").undo()
    assert {foreign.name, other.name} <= set(all_names())


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("When its launcher is killed its supervisor ends")
@needs_docker
def test_nothing_is_left_of_a_launcher_that_is_killed(
    tmp_path: Path, idle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All leftovers of a launcher that is killed in a run with a paused node are removed; foreign
    objects stay.
    """
    foreign = idle()
    table = f"not_chaoskit_{os.getpid()}"
    commands.call(["nft", "add", "table", "inet", table])
    place = find_place(
        "freezer", Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()
    )
    assert place is not None
    group = place.parent / f"not-chaoskit-{os.getpid()}"
    group.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    launcher = subprocess.Popen(
        [sys.executable, "-c", RUNNING, TROUBLED, str(tmp_path / "runs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        names = set(launcher.stdout.readline().split())
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(names) == 3, (
            "of the coordinator and of two nodes: no fault replaces a node, so none stands by"
        )
        assert names <= set(all_names())
        assert sweep() == [], "its launcher lives"
        launcher.kill()
        launcher.wait()
        wait_until(
            lambda: not names & set(all_names()),
            "the guard to remove the containers",
            limit_s=WAIT_S,
        )
        wait_until(lambda: all(linux.is_ending(pid) for pid in pids), "the end of all processes")
        assert sweep() == []
        assert foreign.name in all_names()
        assert table in commands.call(["nft", "list", "tables"]).stdout.decode().split()
        assert group.is_dir()
    finally:
        launcher.kill()
        launcher.communicate()
        commands.call(["nft", "delete", "table", "inet", table])
        group.rmdir()


# -- images ----------------------------------------------------------------------------------------


@needs_docker
def test_an_image_without_chaoskit_is_refused(client: Any, tmp_path: Path) -> None:
    """An image that is missing or lacks Python is bad input."""
    skeleton = docker_image.host_recipe(client).image
    for image, remedy in (
        ("chaoskit-no-such:image", "build or pull it first"),
        (skeleton, "use an image with python3"),
    ):
        substrate = DockerSubstrate(image)
        try:
            with pytest.raises(BadInput, match=remedy):
                substrate.launch(RunConfig(job=resolve_job("gpt")), tmp_path / "run")
        finally:
            substrate.close()


@needs_docker
def test_a_container_that_does_not_start_is_told(tmp_path: Path, client: Any) -> None:
    """A container that does not start is reported with the output of its first process, and is
    removed.
    """
    undo = UndoLog(tmp_path)
    recipe = docker_image.host_recipe(client)
    recipe.environment["PYTHONPATH"] = str(tmp_path)
    recipe = recipe.with_directories([tmp_path], [])
    (tmp_path / "msgspec.py").write_text("raise ImportError('no such luck')")
    container = Container(client, recipe, "node0", tmp_path, undo, cold=True)
    with pytest.raises(HarnessError, match="no such luck"):
        container.start()
    container.remove()
    assert container.name not in all_names()
    undo.close()


def test_the_same_skeleton_every_time() -> None:
    """The image of this Python is the same every time."""
    assert skeleton_archive() == skeleton_archive()


def test_a_directory_within_another_one_is_mounted_once(tmp_path: Path) -> None:
    """A directory within another one that is mounted needs no mount of its own."""
    assert outermost([Path("/a/b"), Path("/a"), Path("/ab"), Path("/a/b/c")]) == [
        Path("/a"),
        Path("/ab"),
    ]
    recipe = Recipe("image", "python", {}, read_only=frozenset({Path("/usr"), tmp_path}))
    assert recipe.with_directories([tmp_path / "job"], []) is recipe
    writing = recipe.with_directories([], [tmp_path / "runs"])
    assert (
        writing.with_directories([tmp_path / "runs" / "001"], [tmp_path / "runs" / "002"])
        is writing
    )
    assert {(mount["Target"], mount["ReadOnly"]) for mount in writing.mounts()} == {
        ("/usr", True),
        (str(tmp_path), True),
        (str(tmp_path / "runs"), False),
    }


# -- a test asks for it ----------------------------------------------------------------------------


@pytest.mark.slow
@needs_docker
@pytest.mark.chaos(substrate="docker")
def test_a_node_is_cut_off_and_comes_back(chaos: Any) -> None:
    """A node in a container is cut off and comes back."""
    outcome = chaos.run(
        TROUBLED,
        nodes=3,
        steps=60,
        options={"step_s": 0.02},
        faults=[Cut(rank=1, at_step=10, heal_after_s=1.0)],
    )
    assert outcome.substrate == "docker"


def test_where_there_is_no_daemon_a_test_is_skipped_visibly(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that asks for containers is skipped with the reason if there is no daemon, and the
    option is refused.
    """
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.chaos(substrate="docker")
        def test_it(chaos):
            pass
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*substrate docker: no Docker daemon at /nowhere/docker.sock*"])
    assert (
        pytester.runpytest_inprocess("--chaos-substrate=docker").ret == pytest.ExitCode.USAGE_ERROR
    )


def test_the_doctor_says_whether_there_is_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor says whether there is a daemon."""
    finding = probes.containers()
    assert finding.state == ("limited" if docker_daemon.unavailable() else "ok")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    finding = probes.containers()
    assert (finding.state, bool(finding.remedy)) == ("limited", True)
    assert "/nowhere/docker.sock" in finding.found


@pytest.mark.parametrize("host", ["tcp://10.0.0.1:2375", "ssh://somewhere"])
def test_a_daemon_elsewhere_is_not_used(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon on another machine is not used."""
    monkeypatch.setenv("DOCKER_HOST", host)
    assert (
        docker_daemon.unavailable()
        == f"DOCKER_HOST={host}: the daemon must be on this machine, behind unix://"
    )
