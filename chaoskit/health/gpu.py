"""What the GPUs of a node say of themselves, judged. How it is read: :mod:`chaoskit.health.nvml`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import msgspec

from chaoskit.health.finding import at_least, at_most, bad, good, warned
from chaoskit.health.limits import Limits
from chaoskit.health.xid import classify
from chaoskit.wire.messages import Finding

#: Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that say that a GPU cannot run as it should.
_HARDWARE_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_SOFTWARE_THERMAL = 0x20
#: NVML_GPU_RECOVERY_ACTION_*; what is not here is newer than this table.
_RECOVERY_ACTIONS = {
    0: "none",
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain P2P",
    4: "drain and reset",
}
_DRAIN_P2P = 3

_RESET = "drain the node and reset the GPU (nvidia-smi -r)"
_REPLACE = "have the GPU replaced"
_COOL = "look at fans, air flow, power supply and the neighbours of this GPU"


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU. None: it does not tell. Counters are of all memory of the GPU.

    ``clock_reasons``: what held its clocks down in every one of several looks. ``xids``: since NVML was opened.
    """

    index: int
    name: str = ""
    uuid: str = ""
    lost: bool = False
    needs_reset: bool = False
    temperature_c: float | None = None
    slowdown_c: float | None = None
    clock_reasons: int | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    retired_pages: int | None = None
    retirement_pending: bool | None = None
    remapped_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery_action: int | None = None
    xids: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()


class GpuReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``absent``: why nothing can be read. ``broken``: there is a driver, but it does not work."""

    absent: str = ""
    broken: bool = False
    driver: str = ""
    devices: tuple[Device, ...] = ()


def judge(reading: GpuReading, limits: Limits, before: GpuReading | None = None) -> list[Finding]:
    """What is wrong with the GPUs.

    Args:
        before: an earlier reading of the same node: what has risen since then is told.
    """
    expected = limits.gpus_expected
    if reading.absent:
        if reading.broken:
            return [
                bad(
                    "gpu.driver",
                    "broken",
                    "reload or reinstall the driver, or reboot",
                    reading.absent,
                )
            ]
        if expected:
            return [
                bad(
                    "gpu.count",
                    0.0,
                    f"{expected} are expected: look for them with nvidia-smi",
                    reading.absent,
                )
            ]
        return [good("gpu.count", 0.0, f"no GPU here: {reading.absent}")]
    count = float(sum(not device.lost for device in reading.devices))
    remedy = "look which is missing with nvidia-smi -L, and restart the machine"
    found = [at_least("gpu.count", count, bad=expected, remedy=remedy)]
    earlier = (
        {device.uuid: device for device in before.devices if device.uuid}
        if before is not None
        else {}
    )
    return [
        *found,
        *chain.from_iterable(_judge(one, earlier.get(one.uuid), limits) for one in reading.devices),
    ]


def _judge(device: Device, before: Device | None, limits: Limits) -> Iterator[Finding]:
    gpu = f"gpu{device.index}"
    yield from _xids(gpu, device)
    if device.lost:
        yield bad(
            f"{gpu}.lost",
            "lost",
            "restart the machine: the GPU does not answer any more (XID 79)",
            device.name,
        )
        return
    yield good(f"{gpu}.lost", "no", device.name)
    if device.needs_reset:
        yield bad(f"{gpu}.reset_required", "yes", _RESET)
    yield from _recovery(gpu, device)
    yield from _temperature(gpu, device, limits)
    yield from _clocks(gpu, device)
    yield from _memory(gpu, device, before, limits)
    yield from (
        warned(f"{gpu}.nvml", "error", "look at nvidia-smi -q", text) for text in device.errors
    )


def _xids(gpu: str, device: Device) -> Iterator[Finding]:
    for number, times in Counter(device.xids).items():
        xid = classify(number)
        detail = f"{xid.name}{f', {times} times' if times > 1 else ''}"
        detail += ": of the application, not of the node" if xid.application else ""
        yield Finding(f"{gpu}.xid", xid.severity, float(number), "", detail, xid.remedy)


def _recovery(gpu: str, device: Device) -> Iterator[Finding]:
    action = device.recovery_action
    if action is None:
        return
    name = _RECOVERY_ACTIONS.get(action, f"action {action}")
    if action == 0:
        yield good(f"{gpu}.recovery_action", name)
    elif action == _DRAIN_P2P:
        yield warned(
            f"{gpu}.recovery_action", name, "end what uses peer-to-peer transfers of this GPU"
        )
    else:
        yield bad(f"{gpu}.recovery_action", name, f"{name}: the driver asks for it")


def _temperature(gpu: str, device: Device, limits: Limits) -> Iterator[Finding]:
    if device.temperature_c is None:
        return
    most = device.slowdown_c if device.slowdown_c is not None else limits.gpu_temperature_max_c
    warn = most - limits.gpu_temperature_margin_c
    yield at_most(f"{gpu}.temperature_c", device.temperature_c, warn=warn, bad=most, remedy=_COOL)


def _clocks(gpu: str, device: Device) -> Iterator[Finding]:
    if device.clock_reasons is None:
        return
    names = [name for bit, name in _HARDWARE_SLOWDOWNS.items() if device.clock_reasons & bit]
    if names:
        yield bad(f"{gpu}.clocks", "held down", _COOL, ", ".join(names))
    elif device.clock_reasons & _SOFTWARE_THERMAL:
        yield warned(f"{gpu}.clocks", "held down", _COOL, "software thermal slowdown")
    else:  # a power cap, a setting, an idle GPU: so it shall be
        yield good(f"{gpu}.clocks", "free")


def _memory(gpu: str, device: Device, before: Device | None, limits: Limits) -> Iterator[Finding]:
    if device.ecc_uncorrected_volatile is not None:
        count = float(device.ecc_uncorrected_volatile)
        most = limits.ecc_uncorrected_volatile_max
        yield at_most(f"{gpu}.ecc_uncorrected_volatile", count, bad=most, remedy=_RESET)
    if device.ecc_uncorrected_aggregate is not None:
        count = float(device.ecc_uncorrected_aggregate)
        warn, remedy = (
            limits.ecc_uncorrected_aggregate_warn,
            "keep an eye on it: this GPU had errors before",
        )
        yield at_most(f"{gpu}.ecc_uncorrected_aggregate", count, warn=warn, remedy=remedy)
        if before is not None and before.ecc_uncorrected_aggregate is not None:
            risen = float(
                max(0, device.ecc_uncorrected_aggregate - before.ecc_uncorrected_aggregate)
            )
            yield at_most(f"{gpu}.ecc_uncorrected_risen", risen, bad=0.0, remedy=_RESET)
    if device.retired_pages is not None:
        pages = float(device.retired_pages)
        yield at_most(f"{gpu}.retired_pages", pages, bad=limits.retired_pages_max, remedy=_REPLACE)
    if device.remap_failed is not None:
        failed = device.remap_failed
        yield (
            bad(f"{gpu}.remap_failed", "yes", _REPLACE)
            if failed
            else good(f"{gpu}.remap_failed", "no")
        )
    if device.remap_pending or device.retirement_pending:
        what = f"{gpu}.remap_pending" if device.remap_pending else f"{gpu}.retirement_pending"
        yield warned(
            what,
            "yes",
            "reset the GPU when it is convenient: it works without the bad memory after that",
        )
