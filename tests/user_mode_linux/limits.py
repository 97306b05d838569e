"""What limits by control groups of version 2 do to processes, on the kernel that this runs on. Prints a line of JSON.

Its second disk, of the device CK_DISK, is written to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from chaoskit.process.linux import start_ticks
from chaoskit.substrate.limits import cgroup
from chaoskit.substrate.limits.cgroup import Cgroup
from chaoskit.substrate.undo import UndoLog

CONTROLLERS = ("cpu", "memory", "pids", "io", "freezer")
MIB = 2**20
WAIT_S = 60.0
WRITTEN_MIB = 3
_DISK = Path("/run/disk")

BURNING = "while True: pass"
# all three wait for a word before they begin
EATING = "import sys; sys.stdin.read(1); hoard = [bytearray(b'x') * 2**20 for _ in range(256)]"
BREEDING = """
import os, sys
sys.stdin.read(1)
for _ in range(5):
    try:
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
    except OSError:
        sys.exit(7)
"""
WRITING = f"""
import mmap, os, sys
sys.stdin.read(1)
block = mmap.mmap(-1, {MIB // 4})
disk = os.open({str(_DISK)!r}, os.O_WRONLY | os.O_DIRECT)
for _ in range({WRITTEN_MIB * 4}):
    os.write(disk, block)
"""


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


def until(true: Callable[[], object]) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while not true() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(true())


def burn(group: Cgroup, process: subprocess.Popen[bytes]) -> dict[str, object]:
    group.limit_cpu(0.2)
    throttled = until(lambda: group.throttled()[0] >= 3 and group.throttled()[1] > 0.01)
    group.limit_cpu(None)
    return {"throttled": throttled, "lives": process.poll() is None}


def eat(group: Cgroup, process: subprocess.Popen[bytes]) -> dict[str, object]:
    group.limit_memory(8 * MIB)
    process.communicate(b"x")
    return {"status": process.returncode, "kills": group.oom_kills()}


def breed(group: Cgroup, process: subprocess.Popen[bytes]) -> dict[str, object]:
    group.limit_pids(2)
    process.communicate(b"x")
    return {"status": process.returncode, "refused": group.refused_forks()}


def write(group: Cgroup, process: subprocess.Popen[bytes]) -> dict[str, object]:
    device = os.environ["CK_DISK"]
    os.mknod(_DISK, 0o600 | 0o060000, os.makedev(*map(int, device.split(":"))))
    group.limit_writes(device, MIB)
    before, began_s = group.written_bytes(device), time.monotonic()
    process.communicate(b"x")
    seconds, written = time.monotonic() - began_s, group.written_bytes(device) - before
    group.limit_writes(device, None)
    return {"status": process.returncode, "seconds": seconds, "written": written}


def freeze(group: Cgroup, process: subprocess.Popen[bytes]) -> dict[str, object]:
    group.freeze()
    frozen = until(group.frozen)
    group.thaw()
    return {
        "frozen": frozen,
        "thawed": until(lambda: not group.frozen()),
        "lives": process.poll() is None,
    }


ACTS = {
    "cpu": (burn, BURNING),
    "memory": (eat, EATING),
    "pids": (breed, BREEDING),
    "io": (write, WRITING),
    "freezer": (freeze, BURNING),
}


def main() -> None:
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpu +memory +pids +io")
    undo = UndoLog(Path("/run/undo"))
    found: dict[str, object] = {}
    for controller, (act, code) in ACTS.items():
        process = start(code)
        group = Cgroup(controller, process.pid, start_ticks(process.pid), undo)
        told = act(group, process)
        process.kill()
        process.wait()
        found[controller] = {
            **told,
            "version": cgroup.version(controller),
            "possible": cgroup.unavailable(controller) == "",
            "removed": group.remove() and not group.path.exists(),
        }
    undo.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
