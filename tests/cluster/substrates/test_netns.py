"""The substrate netns: real networks connect their nodes, are broken as asked, and leave nothing
behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.nodes.network import without_networks
from support.waiting import LIMIT_S, wait_until

from chaoskit.process.linux import descendants
from chaoskit.pytest_plugin import Chaos
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core import commands
from chaoskit.substrate.core.traffic import Block, Narrow, Unplug, between
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.netns.substrate import NamespaceNetwork
from chaoskit.substrate.netns.switch import Switch
from chaoskit.substrate.undo import UndoLog

ROOT = Path(__file__).parents[3]
TROUBLED = f"{ROOT / 'tests' / 'jobs' / 'failing' / 'troubled.py'}:plain"
NODES = ("node0", "node1", "node2", "node3")
NOBODY = 65534

# A launcher in the middle of a run with rank 1 cut off from all.
RUNNING = """
import sys
from pathlib import Path
from chaoskit.config import DETECTION
from chaoskit.experiment.harness import Harness
from chaoskit.substrate.registry import make
from faults import Cut

substrate = make("netns")
steps = int(sys.argv[3])
outcome = Harness(substrate, Path(sys.argv[2])).run(
    sys.argv[1], nodes=2, spares=0, steps=steps, options={"step_s": 0.02}, faults=[Cut(rank=1, at_step=5)], twin=False,
    **DETECTION["relaxed"],
)
substrate.close()
print(outcome.verdict, outcome.reasons, outcome.faults[0].state)
"""

needs_networks = pytest.mark.skipif(
    bool(capabilities.namespaces()), reason=capabilities.namespaces() or "possible here"
)


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    undo = UndoLog()
    switch = Switch(undo, privileged=capabilities.privileged())
    yield switch
    switch.close()
    undo.close()


@pytest.fixture
def network(switch: Switch) -> Iterator[NamespaceNetwork]:
    network = NamespaceNetwork(switch, NODES, 0)
    yield network
    for listener in network.listeners:
        listener.close()
    network.close()


def test_ci_can_make_networks() -> None:
    """CI must be able to make networks, so that none of these tests is skipped unnoticed."""
    if os.environ.get("CI") != "true" or os.geteuid() != 0:
        pytest.skip("not on CI, or not as root")
    assert (
        capabilities.namespaces()
        == capabilities.rules()
        == capabilities.delays()
        == capabilities.rates()
        == ""
    )


# -- networks --------------------------------------------------------------------------------------


@needs_networks
def test_every_station_reaches_every_station(network: NamespaceNetwork) -> None:
    """Each station has an address of its own and answers each other one, and the launcher reaches the coordinator."""
    stations = (COORDINATOR, *NODES)
    assert len({network.host(name) for name in stations}) == len(stations)
    for source in stations:
        for target in stations:
            assert network.round_trips_ms(source, target, 1, 1.0), (source, target)
    with network.connect() as connection:
        assert connection.getpeername() == network.address


@pytest.mark.promise("the kernel counts packets that it dropped by the rule")
@needs_networks
def test_changes_strike_where_they_should_and_are_lifted(network: NamespaceNetwork) -> None:
    """A cut and a pulled cable strike the ways that they name and no other, and end when they are lifted."""
    if reason := capabilities.rules():
        pytest.skip(reason)
    cut = network.impose(Block(ways=between(["node1"], ["node2"])))
    assert not network.round_trips_ms("node1", "node2", 1, 0.1)
    assert network.round_trips_ms("node1", "node3", 1, 1.0)
    pulled = network.impose(Unplug(station="node0"))
    assert not network.round_trips_ms("node3", "node0", 1, 0.1)
    assert cut.lift()
    assert cut.shown() >= 1
    assert pulled.lift()
    assert network.round_trips_ms("node1", "node2", 3, 1.0)
    assert network.round_trips_ms("node3", "node0", 3, 1.0)


@pytest.mark.promise("the kernel counts how often it held packets back")
@needs_networks
def test_a_link_that_is_wide_enough_holds_nothing_back(network: NamespaceNetwork) -> None:
    """Packets that pass within the rate are not counted."""
    if reason := capabilities.rates():
        pytest.skip(reason)
    rate = network.impose(
        Narrow(bits_per_s=8e10, ways=between(["node1"], ["node2"]), stations=("node1",))
    )
    assert len(network.round_trips_ms("node1", "node2", 5, LIMIT_S)) == 5
    assert rate.lift()
    assert rate.shown() == 0


@needs_networks
def test_two_networks_do_not_see_each_other(switch: Switch, network: NamespaceNetwork) -> None:
    """A change of one network strikes the station of that name in no other network."""
    other = NamespaceNetwork(switch, NODES, 0)
    try:
        other.impose(Unplug(station="node1"))
        assert not other.round_trips_ms("node0", "node1", 1, 0.1)
        assert network.round_trips_ms("node0", "node1", 1, 1.0)
    finally:
        for listener in other.listeners:
            listener.close()
        other.close()


# -- no leftovers ----------------------------------------------------------------------------------


def namespace_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def holders(names: Iterable[str]) -> list[int]:
    """Return the processes that are in one of these namespaces, or have it open."""
    searched, pids = set(names), []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        open_now = {namespace_of(pid)}
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    open_now.add(os.readlink(link))
        if open_now & searched:
            pids.append(pid)
    return pids


def other_namespaces(pids: Iterable[int]) -> set[str]:
    return {namespace_of(pid) for pid in pids} - {namespace_of(os.getpid()), ""}


def open_namespaces() -> set[str]:
    """Return the names of the network namespaces that this process has open."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{number}"))
    return {link for link in links if link.startswith("net:[")}


@needs_networks
def test_a_closed_network_is_gone(switch: Switch) -> None:
    """No process stays in a namespace of a closed network, or has one open."""
    before = open_namespaces()
    network = NamespaceNetwork(switch, NODES, 0)
    names = open_namespaces() - before
    assert len(names) == len(NODES) + 1
    assert holders(names)
    for listener in network.listeners:
        listener.close()
    network.close()
    wait_until(lambda: not holders(names), "the end of the namespaces")


@pytest.mark.costly
@needs_networks
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """A launcher that is killed in the middle of a run with a cut leaves no process and no namespace."""
    arguments = [TROUBLED, str(tmp_path / "runs"), str(10**6)]
    launcher = subprocess.Popen([sys.executable, "-c", RUNNING, *arguments], cwd=tmp_path)
    try:
        wait_until(
            lambda: (
                launcher.poll() is not None
                or any(
                    "injected" in path.read_text()
                    for path in tmp_path.glob("runs/*/journal/harness*")
                )
            ),
            "the cut",
        )
        assert launcher.poll() is None
        pids = descendants(launcher.pid)
        names = other_namespaces(pids)
        assert len(names) >= 3  # the namespaces of the coordinator and of two nodes
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_until(
        lambda: not [*holders(names), *filter(_is_ours, pids)],
        "the end of processes and namespaces",
    )


def _is_ours(pid: int) -> bool:
    """Return True if a process with this number lives, and is one of chaoskit's."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("ck-")
    except OSError:
        return False


# -- without root ----------------------------------------------------------------------------------


def is_closed(path: Path) -> bool:
    """Return True if other users may not pass through this directory."""
    return path.stat().st_mode & 0o001 == 0


def opening(paths: Iterable[Path], store: Path) -> str:
    """Return shell commands that let every user reach these directories, in a mount namespace of
    their own.
    """
    lines: list[str] = []
    closed: dict[Path, list[tuple[Path, Path]]] = {}
    for number, path in enumerate(dict.fromkeys(paths)):
        for parent in reversed(path.parents):
            if is_closed(parent):
                kept = store / str(number)
                lines += [f"mkdir -p {kept}", f"mount --bind '{path}' {kept}"]
                closed.setdefault(parent, []).append((path, kept))
                break
    for parent, within in closed.items():
        lines.append(f"mount -t tmpfs -o mode=755 none '{parent}'")
        lines += [f"mkdir -p '{path}' && mount --bind {kept} '{path}'" for path, kept in within]
    return "\n".join(["set -e", *lines])


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("as root or as an ordinary user in a user namespace")
@needs_networks
def test_an_ordinary_user_runs_it_in_a_user_namespace() -> None:
    """A user without any rights runs netns in a user namespace; Python's files are made readable
    for that user.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    if commands.find("setpriv") is None:
        pytest.skip("setpriv is not installed")
    home = Path(tempfile.mkdtemp(prefix="chaoskit-nobody-", dir="/tmp"))
    try:
        os.chown(home, NOBODY, NOBODY)
        ran = subprocess.run(
            [*as_nobody(home), sys.executable, "-c", RUNNING, TROUBLED, str(home / "runs"), "60"],
            env={
                **os.environ,
                "HOME": str(home),
                "TMPDIR": str(home),
                "XDG_STATE_HOME": str(home / "state"),
            },
            cwd="/",
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        shutil.rmtree(home)
    if "use 'local':" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(ran.stderr.strip().splitlines()[-1])
    assert ran.stdout.split() == ["passed", "[]", "confirmed"], ran.stderr


def as_nobody(home: Path) -> list[str]:
    needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    become = f"exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups " + '"$@"'
    return ["unshare", "--mount", "sh", "-c", f"{opening(needed, home / 'mounts')}\n{become}", "sh"]


# -- a test asks for it ----------------------------------------------------------------------------

ASKING = """
import pytest

@pytest.mark.chaos(substrate="netns")
def test_it(chaos):
    assert chaos.harness.host.name == "netns"
"""


@pytest.mark.promise("on the substrate `netns`, network namespaces on this machine")
@needs_networks
@pytest.mark.chaos(substrate="netns")
def test_a_marker_gives_a_test_its_substrate(chaos: Chaos) -> None:
    """The marker ``chaos`` chooses the substrate of a test."""
    outcome = chaos.run(TROUBLED, nodes=2, steps=4, twin=False)
    assert outcome.substrate == "netns"


def test_where_there_is_none_a_test_is_skipped_visibly(pytester: pytest.Pytester) -> None:
    """A test that asks for networks is skipped with the reason if none can be made, and the option
    is refused.
    """
    pytester.makepyfile(ASKING)
    session = without_networks(sys.executable, "-m", "pytest", "-rs")
    result = pytester.run(*session)
    if result.errlines and result.errlines[0].startswith(("unshare:", "sh:")):
        pytest.skip(result.errlines[0])
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["*substrate netns: network namespaces cannot be created as this user*"]
    )
    assert pytester.run(*session, "--chaos-substrate=netns").ret == pytest.ExitCode.USAGE_ERROR


def test_the_command_line_decides_over_the_marker(pytester: pytest.Pytester) -> None:
    """``--chaos-substrate`` overrides the marker."""
    pytester.makepyfile(ASKING.replace('== "netns"', '== "local"'))
    pytester.runpytest_inprocess("--chaos-substrate=local").assert_outcomes(passed=1)


@needs_networks
def test_a_setting_decides_where_there_is_no_marker(pytester: pytest.Pytester) -> None:
    """The setting ``chaos_substrate`` is used for tests without a marker."""
    pytester.makeini("[pytest]\nchaos_substrate = netns")
    pytester.makepyfile(ASKING.replace("@pytest.mark", "#"))
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
