"""Findings of the doctor, compared with independent views of the machine, and under limits that the
tests set.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.nodes.network import without_networks

from chaoskit.cli.machine import doctor, probes
from chaoskit.cli.machine.probes import DoctorFinding
from chaoskit.faults.describe import here
from chaoskit.faults.kinds import kinds
from chaoskit.process.linux import start_ticks
from chaoskit.report.terminal import Terminal
from chaoskit.substrate.core import commands
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.undo import ContinueEntry, UndoLog, left_behind, sweep


def findings_by_name(*probed: probes.Probe) -> dict[str, DoctorFinding]:
    """Return the findings of these probes, by name."""
    return {finding.name: finding for finding in doctor.examine(probed)}


def limited(setup: str, probe: str) -> dict[str, str]:
    """Return the finding of a probe, written as a call, in a process of its own after ``setup``."""
    code = (
        f"import json, os, resource, sys\nfrom chaoskit.cli.machine import probes\n{setup}\nfound = probes.{probe}\n"
        "print(json.dumps({'state': found.state, 'found': found.found, 'remedy': found.remedy}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    finding: dict[str, str] = json.loads(ran.stdout)
    return finding


NETWORKS = """
import json
from chaoskit.cli.machine import probes
print(json.dumps({one.name: [one.state, one.found] for one in probes.networks()}))
"""


def networks(command: list[str]) -> dict[str, list[str]]:
    """Return the state and text of each finding of ``networks``, as a command with its own
    namespaces prints them.

    Skips if this user may not have such namespaces.
    """
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not ran.stdout and ran.stderr.startswith(("unshare:", "sh:", "mount:")):
        pytest.skip(ran.stderr.strip())
    findings: dict[str, list[str]] = json.loads(ran.stdout)
    return findings


def without(*tools: str) -> dict[str, list[str]]:
    """Return the findings of :func:`networks` on a machine on which these commands cannot be
    executed.
    """
    paths = {str(Path(path).resolve()) for tool in tools if (path := commands.find(tool))}
    script = "".join(f"mount --bind /dev/null '{path}'\n" for path in sorted(paths)) + 'exec "$@"'
    isolation = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    return networks([*isolation, "sh", "-ec", script, "sh", sys.executable, "-c", NETWORKS])


# -- against the machine ---------------------------------------------------------------------------


def test_every_finding_is_whole() -> None:
    """Every finding has a name of its own, a state and words, and a remedy exactly if something is
    wrong.
    """
    findings = doctor.examine()
    assert len({finding.name for finding in findings}) == len(findings)
    for finding in findings:
        assert finding.state in ("ok", "limited", "missing")
        assert finding.found
        assert bool(finding.remedy) == (finding.state != "ok")
    assert doctor.can_run(findings)  # the tests run here


def test_versions_are_those_that_run() -> None:
    """The versions of Python and torch are those of this process."""
    findings = findings_by_name(probes.python, probes.torch_version)
    assert findings["Python"].found.startswith("{}.{}.{}".format(*sys.version_info))
    assert findings["torch"].found == torch.__version__
    assert findings_by_name(probes.gpus)["GPUs"].state == (
        "ok" if torch.cuda.is_available() else "limited"
    )


def test_cores_and_memory_are_the_machine_s() -> None:
    """Cores are those that this process may use; memory is that of the machine."""
    findings = findings_by_name(probes.cores, probes.memory)
    status = Path("/proc/self/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("Cpus_allowed:")).split()[1]
    assert findings["cores"].found.split()[0] == str(int(mask.replace(",", ""), 16).bit_count())
    total_kb = int(Path("/proc/meminfo").read_text().split()[1])
    assert f"of {total_kb / 2**20:.1f} GiB" in findings["memory"].found


def test_limits_are_the_shell_s() -> None:
    """The limit of open files is the one that a shell reports."""
    soft = subprocess.run(
        ["sh", "-c", "ulimit -n"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert f"at most {soft} " in findings_by_name(probes.open_files)["open files"].found


@pytest.mark.parametrize("controller", ["cpu", "memory", "pids", "io", "freezer"])
def test_control_groups_that_can_be_made_are_made(controller: str) -> None:
    """A group can be made by hand beside that of this process for each controller that is reported
    as usable.
    """
    from chaoskit.substrate.limits.cgroup import find_place

    finding = findings_by_name(probes.control_groups)[f"cgroup {controller}"]
    if finding.state != "ok":
        pytest.skip(finding.found)
    place = find_place(
        controller, Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()
    )
    assert place is not None
    assert finding.found.startswith(f"v{place.version}, ")
    group = place.parent / f"chaoskit-{os.getpid()}-doctor"
    group.mkdir()
    group.rmdir()


def test_the_compiler_compiles(tmp_path: Path) -> None:
    """The compiler that is found makes a program that runs."""
    finding = findings_by_name(probes.compiler)["compiler"]
    if finding.state != "ok":
        pytest.skip(finding.found)
    (tmp_path / "one.cpp").write_text(
        "#include <vector>\nint main() { return std::vector<int>(3, 1)[2] - 1; }\n"
    )
    subprocess.run(
        [finding.found.partition(",")[0], "-o", "one", "one.cpp"], cwd=tmp_path, check=True
    )
    subprocess.run([tmp_path / "one"], check=True)


def test_the_death_signal_is_left_as_it_was() -> None:
    """The probe of PR_SET_PDEATHSIG puts back the signal that was set."""
    libc, held = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(1, signal.SIGUSR2)
    try:
        assert findings_by_name(probes.death_signal)["PR_SET_PDEATHSIG"].state == "ok"
        libc.prctl(2, ctypes.byref(held))
        assert held.value == signal.SIGUSR2
    finally:
        libc.prctl(1, 0)


HELD = """
import os, threading
from chaoskit.cli.machine import doctor
from chaoskit.process.linux import children

def held():
    return len(os.listdir("/proc/self/fd")), set(children(os.getpid())), threading.active_count()

doctor.examine()  # torch opens what it keeps
before = held()
doctor.examine()
print(before == held() or f"{before} became {held()}")
"""


def test_nothing_is_left_running_or_open() -> None:
    """An examination leaves no file descriptor, no child and no thread in its process."""
    ran = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


# -- what is wrong is found ------------------------------------------------------------------------


def test_few_open_files() -> None:
    """A low limit of open files is limited, a very low one missing, and the remedy raises it."""
    finding = limited("resource.setrlimit(resource.RLIMIT_NOFILE, (300, 4096))", "open_files()")
    assert finding == {
        "state": "limited",
        "found": "at most 300 (could be raised to 4096)",
        "remedy": "ulimit -n 1024",
    }
    assert (
        limited("resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))", "open_files()")["state"]
        == "missing"
    )


def test_few_processes() -> None:
    """A low limit of processes is limited."""
    finding = limited("resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))", "processes()")
    assert (finding["state"], finding["found"]) == ("limited", "at most 100 (ulimit)")


def test_one_core() -> None:
    """The finding reports a single core."""
    finding = limited("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "cores()")
    assert (finding["state"], finding["found"].split()[0]) == ("limited", "1")


def test_a_mutex_that_the_kernel_does_not_break() -> None:
    """A latch without the attribute that makes the kernel break it (PTHREAD_MUTEX_STALLED) is
    reported as limited.
    """
    finding = limited("", "robust_mutex(robust=False, wait_s=0.5)")
    assert (finding["state"], finding["found"]) == ("limited", "not broken when its owner ends")


def test_no_memory_to_share() -> None:
    """A file that may not grow beyond 64 KiB: the kernel refuses, and the finding has the words of
    the kernel.
    """
    setup = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    setup += "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"
    finding = limited(setup, "memfd()")
    assert (finding["state"], finding["found"]) == ("missing", "[Errno 27] File too large")


def test_no_compiler() -> None:
    """The finding names the compilers that were looked for if none is on the PATH."""
    finding = limited("os.environ.pop('CXX', None); os.environ['PATH'] = '/nowhere'", "compiler()")
    assert finding["state"] == "limited"
    assert finding["found"].startswith("none of g++, clang++ is on the PATH")


def test_networks_without_util_linux() -> None:
    """The doctor names the commands that are missing to make networks, and the package that has
    them.
    """
    findings = without("unshare", "nsenter")
    assert findings == {
        "network namespaces": ["limited", "unshare and nsenter not found: install util-linux"]
    }


def test_networks_that_the_kernel_refuses() -> None:
    """If the kernel allows no further network namespace, the doctor reports missing rights."""
    findings = networks(without_networks(sys.executable, "-c", NETWORKS))
    assert [*findings] == ["network namespaces"]
    assert findings["network namespaces"][0] == "limited"
    assert findings["network namespaces"][1].endswith("run as root")


def test_networks_that_cannot_be_broken() -> None:
    """Networks can be made without nftables and iptables, and the doctor reports which faults are
    impossible.
    """
    if capabilities.namespaces():
        pytest.skip(capabilities.namespaces())
    findings = without("nft", "iptables")
    assert findings["network namespaces"][0] == "ok"
    assert findings["nftables"] == ["limited", "nft not found: install the package nftables"]
    assert "netem" in findings["packet delays"][1]


@pytest.mark.parametrize(
    ("variable", "probe", "below"),
    [("XDG_STATE_HOME", "state", ""), ("XDG_CACHE_HOME", "cache", "/twins")],
)
def test_a_directory_of_the_user_that_is_a_file(
    tmp_path: Path, variable: str, probe: str, below: str
) -> None:
    """A missing state directory means that no node is kept out, a missing cache that no twin is
    kept.

    A directory that can be made is fine.
    """
    (tmp_path / "chaoskit").write_text("not a directory")
    finding = limited(f"os.environ[{variable!r}] = {str(tmp_path)!r}", f"{probe}_directory()")
    assert finding["state"] == "limited"
    assert variable in finding["remedy"]
    finding = limited(
        f"os.environ[{variable!r}] = {str(tmp_path / 'new')!r}", f"{probe}_directory()"
    )
    assert (finding["state"], finding["found"]) == (
        "ok",
        f"{tmp_path / 'new' / 'chaoskit'}{below} can be made",
    )


def test_nothing_may_be_broken_without_a_place_for_undo(tmp_path: Path) -> None:
    """If no directory for the undo log can be made, it is reported as missing, with the reason for
    each directory.
    """
    (tmp_path / "file").write_text("not a directory")
    nowhere = {"XDG_RUNTIME_DIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "file")}
    finding = limited(
        f"import os; os.environ.update({nowhere!r}); os.geteuid = lambda: 12345",
        "runtime_directory()",
    )
    assert finding["state"] == "missing"
    assert str(tmp_path / "file") in finding["found"]
    assert "XDG_RUNTIME_DIR" in finding["remedy"]
    finding = limited(f"os.environ['XDG_RUNTIME_DIR'] = {str(tmp_path)!r}", "runtime_directory()")
    assert (finding["state"], finding["found"]) == ("ok", f"{tmp_path / 'chaoskit'} can be written")


def test_users_are_not_told_to_install_tools_of_developers() -> None:
    """Every other optional group has a finding, installed or not."""
    groups = {name.removeprefix("extra ") for name in findings_by_name(probes.extras)}
    assert groups >= {"docker", "gpu", "observe", "s3"}
    assert "dev" not in groups


def test_what_a_killed_launcher_left_is_told_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The undo log of a killed launcher is found; the doctor repairs nothing, the janitor does."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    before = left_behind()  # leftovers of other sessions on this machine
    try:
        code = (
            "import os, signal\nfrom chaoskit.substrate.undo import ContinueEntry, UndoLog\n"
            f"undo = UndoLog()\nundo.plan(ContinueEntry({stopped.pid}, {start_ticks(stopped.pid)}))\n"
            "os.kill(undo.guard_pid, signal.SIGKILL)\nos.waitpid(undo.guard_pid, 0)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        assert (
            subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
        )
        live = UndoLog()
        live.plan(ContinueEntry(os.getpid(), start_ticks(os.getpid())))  # of a launcher that lives
        finding = findings_by_name(probes.left_behind)["undo"]
        assert (finding.state, finding.remedy) == ("limited", "chaoskit cleanup")
        assert f"continue pid {stopped.pid}" in str(finding.found)
        assert set(left_behind()) - set(before) == {f"continue pid {stopped.pid}"}
        assert f"pid {stopped.pid}" in [repair.target for repair in sweep()]
        assert left_behind() == before
        assert findings_by_name(probes.left_behind)["undo"].state == ("limited" if before else "ok")
        live.close()
    finally:
        stopped.kill()
        stopped.wait()


def test_what_of_the_core_is_missing_decides() -> None:
    """A training can run unless a part of the core is missing."""
    lacking = DoctorFinding("memfd", "missing", "refused", "allow it", core=True)
    poor = DoctorFinding("GPUs", "limited", "none", "buy one")
    assert doctor.can_run([poor])
    assert not doctor.can_run([poor, lacking])
    assert doctor.plain([lacking])["ok"] is False


def test_faults_that_lack_the_same_thing_share_one_line() -> None:
    reasons = {
        state_here["reason"] for kind in kinds() if (state_here := here(kind))["state"] != "yes"
    }
    file = io.StringIO()
    Terminal(file=file, width=2000).print(doctor.render([]))
    assert {reason: file.getvalue().count(f"→ {reason}") for reason in reasons} == dict.fromkeys(
        reasons, 1
    )
