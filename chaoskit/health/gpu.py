"""Findings on the GPUs of a node, from a reading of :mod:`chaoskit.health.nvml`.

-> ``health/nvml.py``: reads the GPUs. ``health/xid.py``: severity of each XID.
-> ``daemon/node_check.py``: watches GPUs in a run. ``health/verdict.py``: decides by the findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import msgspec

from chaoskit.health.finding import at_least, at_most, bad, good, warned
from chaoskit.health.limits import HealthLimits
from chaoskit.health.xid import classify
from chaoskit.wire.messages import Finding

#: Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) for slowdowns of a GPU.
_HARDWARE_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_SOFTWARE_THERMAL = 0x20
#: Names of NVML_GPU_RECOVERY_ACTION_*; other numbers are newer than this table.
_RECOVERY_ACTIONS = {
    0: "none",
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain P2P",
    4: "drain and reset",
}
_DRAIN_P2P = 3

_RESET_REMEDY = "drain the node and reset the GPU (nvidia-smi -r)"
_REPLACE_REMEDY = "have the GPU replaced"
_COOL_REMEDY = "check fans, air flow, power supply and the neighbouring GPUs"


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reading of one GPU. None stands for a value that it does not report.

    Counters are of all memory of the GPU.

    Attributes:
        index: number of the GPU in NVML, from 0 on.
        name, uuid: its product name and its UUID; "" if they are unknown.
        lost: True if the GPU does not answer; only its index, UUID and XIDs are known then.
        needs_reset: True if a call failed because the GPU must be reset.
        temperature_c: its temperature in degrees Celsius.
        slowdown_c: temperature at which the GPU slows down.
        clock_reasons: bits of the reasons that held its clocks down in all of several looks.
        ecc_uncorrected_volatile, ecc_uncorrected_aggregate: uncorrected ECC errors since the driver
            was loaded, and over the life of the GPU.
        retired_pages: number of retired pages, on GPUs before Ampere.
        retirement_pending, remap_pending: True if bad memory is taken out of use at a reset.
        remapped_uncorrected: rows that were remapped after uncorrected errors.
        remap_failed: True if bad memory could not be replaced.
        recovery_action: number of the action that the driver asks for; 0 for none.
        xids: XIDs since NVML was opened.
        errors: other errors of NVML, each once.
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
    """Reading of all GPUs.

    Attributes:
        absent: reason why no GPU can be read; "" if GPUs are read.
        broken: True if a driver is installed, but does not work.
        driver: version of the driver.
        devices: reading of each GPU.
    """

    absent: str = ""
    broken: bool = False
    driver: str = ""
    devices: tuple[Device, ...] = ()


def judge(
    reading: GpuReading, limits: HealthLimits, before: GpuReading | None = None
) -> list[Finding]:
    """Return the findings on the GPUs.

    Those on one GPU are named by its index (``gpu0.clocks``). Missing GPUs are bad only if the
    limits name a number of GPUs. A driver that does not work is always bad.

    Args:
        before: an earlier reading of the same node. A risen count of uncorrected errors is bad.
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
                    f"check with nvidia-smi: this node should have {expected}",
                    reading.absent,
                )
            ]
        return [good("gpu.count", 0.0, f"no GPU here: {reading.absent}")]
    count = float(sum(not device.lost for device in reading.devices))
    remedy = "find the missing GPU with nvidia-smi -L, and restart the machine"
    findings = [at_least("gpu.count", count, bad=expected, remedy=remedy)]
    earlier = (
        {device.uuid: device for device in before.devices if device.uuid}
        if before is not None
        else {}
    )
    return [
        *findings,
        *chain.from_iterable(
            _findings_on(gpu, earlier.get(gpu.uuid), limits) for gpu in reading.devices
        ),
    ]


def _findings_on(device: Device, before: Device | None, limits: HealthLimits) -> Iterator[Finding]:
    """Yield all findings on one GPU; on a lost GPU, only its loss and its XIDs."""
    gpu = f"gpu{device.index}"
    yield from _xids(gpu, device)
    if device.lost:
        yield bad(
            f"{gpu}.lost",
            "lost",
            "restart the machine: the GPU no longer answers (XID 79)",
            device.name,
        )
        return
    yield good(f"{gpu}.lost", "no", device.name)
    if device.needs_reset:
        yield bad(f"{gpu}.reset_required", "yes", _RESET_REMEDY)
    yield from _recovery(gpu, device)
    yield from _temperature(gpu, device, limits)
    yield from _clocks(gpu, device)
    yield from _memory(gpu, device, before, limits)
    yield from (
        warned(f"{gpu}.nvml", "error", "check nvidia-smi -q", text) for text in device.errors
    )


def _xids(gpu: str, device: Device) -> Iterator[Finding]:
    """Yield a finding for each different XID, with the severity of :func:`classify`."""
    for number, times in Counter(device.xids).items():
        xid = classify(number)
        detail = f"{xid.name}{f', {times} times' if times > 1 else ''}"
        detail += ": of the application, not of the node" if xid.application else ""
        yield Finding(f"{gpu}.xid", xid.severity, float(number), "", detail, xid.remedy)


def _recovery(gpu: str, device: Device) -> Iterator[Finding]:
    """Yield a finding on the action that the driver asks for, if it reports that."""
    action = device.recovery_action
    if action is None:
        return
    name = _RECOVERY_ACTIONS.get(action, f"action {action}")
    if action == 0:
        yield good(f"{gpu}.recovery_action", name)
    elif action == _DRAIN_P2P:
        yield warned(
            f"{gpu}.recovery_action",
            name,
            "end the processes that use peer-to-peer transfers of this GPU",
        )
    else:
        yield bad(f"{gpu}.recovery_action", name, f"{name}, as the driver requests")


def _temperature(gpu: str, device: Device, limits: HealthLimits) -> Iterator[Finding]:
    """Yield a finding on the temperature, against the GPU's own limit if it reports one."""
    if device.temperature_c is None:
        return
    limit_c = device.slowdown_c if device.slowdown_c is not None else limits.gpu_temperature_max_c
    warn = limit_c - limits.gpu_temperature_margin_c
    yield at_most(
        f"{gpu}.temperature_c", device.temperature_c, warn=warn, bad=limit_c, remedy=_COOL_REMEDY
    )


def _clocks(gpu: str, device: Device) -> Iterator[Finding]:
    """Yield a finding on slowdowns: bad by the hardware, a warning by the driver for heat."""
    if device.clock_reasons is None:
        return
    names = [name for bit, name in _HARDWARE_SLOWDOWNS.items() if device.clock_reasons & bit]
    if names:
        yield bad(f"{gpu}.clocks", "held down", _COOL_REMEDY, ", ".join(names))
    elif device.clock_reasons & _SOFTWARE_THERMAL:
        yield warned(f"{gpu}.clocks", "held down", _COOL_REMEDY, "software thermal slowdown")
    else:  # a power cap, a setting, an idle GPU: as intended
        yield good(f"{gpu}.clocks", "free")


def _memory(
    gpu: str, device: Device, before: Device | None, limits: HealthLimits
) -> Iterator[Finding]:
    """Yield findings on ECC errors, retired pages and remapped rows of the GPU's memory."""
    if device.ecc_uncorrected_volatile is not None:
        count = float(device.ecc_uncorrected_volatile)
        max_count = limits.ecc_uncorrected_volatile_max
        yield at_most(f"{gpu}.ecc_uncorrected_volatile", count, bad=max_count, remedy=_RESET_REMEDY)
    if device.ecc_uncorrected_aggregate is not None:
        count = float(device.ecc_uncorrected_aggregate)
        warn, remedy = (
            limits.ecc_uncorrected_aggregate_warn,
            "monitor this GPU: it had errors before",
        )
        yield at_most(f"{gpu}.ecc_uncorrected_aggregate", count, warn=warn, remedy=remedy)
        if before is not None and before.ecc_uncorrected_aggregate is not None:
            risen = float(
                max(0, device.ecc_uncorrected_aggregate - before.ecc_uncorrected_aggregate)
            )
            yield at_most(f"{gpu}.ecc_uncorrected_risen", risen, bad=0.0, remedy=_RESET_REMEDY)
    if device.retired_pages is not None:
        pages = float(device.retired_pages)
        yield at_most(
            f"{gpu}.retired_pages", pages, bad=limits.retired_pages_max, remedy=_REPLACE_REMEDY
        )
    if device.remap_failed is not None:
        failed = device.remap_failed
        yield (
            bad(f"{gpu}.remap_failed", "yes", _REPLACE_REMEDY)
            if failed
            else good(f"{gpu}.remap_failed", "no")
        )
    if device.remap_pending or device.retirement_pending:
        what = f"{gpu}.remap_pending" if device.remap_pending else f"{gpu}.retirement_pending"
        yield warned(
            what,
            "yes",
            "reset the GPU when convenient: after a reset, it does not use the bad memory",
        )
