"""XIDs, the error numbers of NVIDIA's GPU driver: cause, severity and remedy of each.

They follow the immediate action that
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html names for each. An XID that
needs a reset or a restart of the machine is bad. If the application must be restarted, or nothing
done, the node may go on, with a warning if the hardware is the cause.

-> ``health/nvml.py``: collects the XIDs. ``health/gpu.py``: makes a finding of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

_APPLICATION = {
    8: "GPU stopped processing",
    11: "invalid push buffer stream",
    13: "graphics engine exception",
    14: "injected from user space",
    25: "illegal push buffer stream",
    31: "GPU memory page fault",
    43: "the application hit a fault of its own",
    45: "cleanup after the application ended",
    68: "video decoder exception",
    69: "graphics engine class error",
    106: "test message",
    107: "test message",
    137: "illegal access of a peer over NVLink",
}
_WATCH = {
    32: "corrupted push buffer stream, mostly a matter of PCIe",
    63: "a memory row or page was retired",
    92: "high rate of single-bit ECC errors",
    94: "contained memory error: one application had to end",
    121: "corrected error of the link to the CPU",
    144: "NVLink error",
    145: "NVLink error",
    146: "NVLink error",
    147: "NVLink error",
    148: "NVLink error",
    149: "NVLink error",
    150: "NVLink error",
    154: "the recovery action changed",
    157: "a resource could not be retired",
}
_RESET = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "halt of an internal micro-controller",
    64: "a memory row or page could not be retired",
    74: "NVLink error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation error",
    155: "NVLink down",
    156: "a resource was retired",
    158: "fatal timeout of the GPU",
    171: "uncorrectable error of its memory",
    172: "uncorrectable error of its SRAM",
}
_RESTART = {54: "auxiliary power is not connected", 79: "GPU has fallen off the bus"}

_WATCH_REMEDY = "reset the GPU when convenient (nvidia-smi -r), and watch for more of these errors"
_RESET_REMEDY = "reset the GPU (nvidia-smi -r); if the error returns, have the hardware examined"
_RESTART_REMEDY = "restart the machine, and check power and PCIe connections"
_UNKNOWN_REMEDY = "look up the XID in NVIDIA's XID catalog"


class Xid(NamedTuple):
    """Error number of the driver.

    Attributes:
        name: description of the error.
        severity: ``bad`` keeps the node out, ``warn`` does not, ``ok`` is no problem of the node.
        remedy: advice; "" for an error of the application.
        application: True if the job caused the error, and would cause it on any other node.
    """

    number: int
    name: str
    severity: Literal["ok", "warn", "bad"]
    remedy: str
    application: bool = False


def _all_xids() -> Iterable[Xid]:
    """Yield the properties of all XIDs in the tables above."""
    yield from (Xid(number, name, "ok", "", True) for number, name in _APPLICATION.items())
    yield from (Xid(number, name, "warn", _WATCH_REMEDY) for number, name in _WATCH.items())
    yield from (Xid(number, name, "bad", _RESET_REMEDY) for number, name in _RESET.items())
    yield from (Xid(number, name, "bad", _RESTART_REMEDY) for number, name in _RESTART.items())


XIDS = {xid.number: xid for xid in _all_xids()}


def classify(number: int) -> Xid:
    """Return the properties of an XID. An unknown one deserves a warning."""
    return XIDS.get(number) or Xid(number, "not in the table of chaoskit", "warn", _UNKNOWN_REMEDY)
