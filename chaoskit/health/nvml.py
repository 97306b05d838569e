"""Reads GPUs through NVML (the package ``nvidia-ml-py``, module ``pynvml``), where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from chaoskit.errors import ChaoskitError
from chaoskit.health.gpu import Device, GpuReading

# nvml.h: nvmlReturn_t. The numbers are the interface of the C library; the binding has a class for each.
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND = 9, 12
_NO_PERMISSION, _GPU_IS_LOST, _RESET_REQUIRED = 4, 15, 16
_UNTOLD = {
    2,
    3,
    4,
    6,
    13,
    21,
    25,
}  # argument, support, permission, not found, no such function, no data, version
_UNCORRECTED, _VOLATILE, _AGGREGATE = 1, 0, 1
_TEMPERATURE, _SLOWDOWN = 0, 1
_DOUBLE_BIT = 1
_MULTIPLE_SINGLE_BIT = 0
_FIELD_RECOVERY_ACTION = 230
_EVENT_XID = 0x8

_LOOKS = (
    3  # hardware slowdown is reported for a moment when clocks change, too (DCGM, field constants)
)
_LOOK_S = 0.01
_EVENTS_MAX = 1000  # at a time: a GPU that stutters must not keep us


class NoGpu(ChaoskitError):
    """NVML cannot be used here. ``broken``: a driver is there, and does not work."""

    def __init__(self, reason: str, *, broken: bool = False) -> None:
        self.broken = broken
        super().__init__(reason)


class _Lost(ChaoskitError):
    """The GPU does not answer any more."""


class _NotOurs(ChaoskitError):
    """The GPU is there, and this process may not use it."""


class Nvml:
    """NVML, initialised; to be closed.

    Args:
        library: the module ``pynvml``, or a recording of what it said.

    Raises:
        NoGpu: if there is no library, no driver, or one that does not work.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else _import()
        self._events: Any = None
        self._xids: dict[
            str, list[int]
        ] = {}  # by UUID of the GPU; "" for one that cannot say it any more
        try:
            self._library.nvmlInit()
        except self._library.NVMLError as error:
            broken = error.value not in (_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND)
            raise NoGpu(f"NVML: {error}", broken=broken) from None
        self._watch_xids()

    def close(self) -> None:
        """Free what NVML holds."""
        try:
            if self._events is not None:
                self._library.nvmlEventSetFree(self._events)
            self._library.nvmlShutdown()
        except self._library.NVMLError:
            pass  # the driver is gone, and what it held with it

    def _watch_xids(self) -> None:
        """NVML tells only of XIDs that come after this."""
        library = self._library
        try:
            self._events = library.nvmlEventSetCreate()
            for index in range(library.nvmlDeviceGetCount()):
                self._ask(self._register, index)
        except (library.NVMLError, _Lost):
            return  # what the devices say when they are read is told then

    def _register(self, index: int) -> None:
        handle = self._library.nvmlDeviceGetHandleByIndex(index)
        self._library.nvmlDeviceRegisterEvents(handle, _EVENT_XID, self._events)

    def await_xid(self, wait_s: float) -> bool:
        """Sleep until an XID comes, ``wait_s`` at most. Whether one came; :meth:`read` tells which."""
        if self._events is None:
            time.sleep(wait_s)
            return False
        return self._drain_xids(wait_s)

    def _drain_xids(self, wait_s: float = 0.0) -> bool:
        """Take in what has happened. Whether that is anything."""
        drained = 0
        while self._events is not None and drained < _EVENTS_MAX:
            try:
                event = self._library.nvmlEventSetWait_v2(
                    self._events, 0 if drained else int(wait_s * 1000)
                )
            except self._library.NVMLError:
                break  # a time-out: there are no more; or the GPU is lost, which its reading tells
            uuid = self._of(self._library.nvmlDeviceGetUUID, event.device)
            self._xids.setdefault(uuid, []).append(int(event.eventData))
            drained += 1
        return bool(drained)

    def _of(self, call: Callable[[Any], str], handle: Any) -> str:
        try:
            return str(call(handle))
        except self._library.NVMLError:
            return ""

    def read(self) -> GpuReading:
        """All GPUs as they are now, with every XID since this was made."""
        library = self._library
        try:
            driver, count = str(library.nvmlSystemGetDriverVersion()), library.nvmlDeviceGetCount()
        except library.NVMLError as error:
            return GpuReading(absent=f"NVML: {error}", broken=True)
        self._drain_xids()
        xids = dict(self._xids)
        devices = tuple(
            one for index in range(count) if (one := self._device(index, xids)) is not None
        )
        orphans = tuple(number for numbers in xids.values() for number in numbers)
        if orphans:  # of a GPU that is not listed any more
            devices += (Device(index=count, lost=True, xids=orphans),)
        return GpuReading(driver=driver, devices=devices)

    def _device(self, index: int, xids: dict[str, list[int]]) -> Device | None:
        """``xids`` that belong to this GPU are taken out."""
        uuid, mine = "", tuple[int, ...]()
        try:
            handle = self._required(self._library.nvmlDeviceGetHandleByIndex, index)
            uuid = str(self._required(self._library.nvmlDeviceGetUUID, handle))
            mine = tuple(xids.pop(uuid, ()))
            return self._read(index, handle, uuid, mine)
        except _Lost:
            return Device(index=index, uuid=uuid, lost=True, xids=mine)
        except _NotOurs:
            return None

    def _read(self, index: int, handle: Any, uuid: str, xids: tuple[int, ...]) -> Device:
        library, errors = self._library, list[str]()

        def ask(call: str, *arguments: Any) -> Any:
            return self._ask(getattr(library, call, None), handle, *arguments, errors=errors)

        remapped = ask("nvmlDeviceGetRemappedRows") or (None,) * 4
        retired = [
            ask("nvmlDeviceGetRetiredPages", cause) for cause in (_MULTIPLE_SINGLE_BIT, _DOUBLE_BIT)
        ]
        pending = ask("nvmlDeviceGetRetiredPagesPendingStatus")
        return Device(
            index=index,
            uuid=uuid,
            name=str(ask("nvmlDeviceGetName") or ""),
            needs_reset=any(f"({_RESET_REQUIRED})" in error for error in errors),
            temperature_c=ask("nvmlDeviceGetTemperature", _TEMPERATURE),
            slowdown_c=ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN),
            clock_reasons=self._steady_reasons(ask),
            ecc_uncorrected_volatile=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
            ecc_uncorrected_aggregate=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _AGGREGATE),
            retired_pages=None if None in retired else sum(len(pages) for pages in retired),
            retirement_pending=None if pending is None else bool(pending),
            remapped_uncorrected=remapped[1],
            remap_pending=None if remapped[2] is None else bool(remapped[2]),
            remap_failed=None if remapped[3] is None else bool(remapped[3]),
            recovery_action=self._recovery_action(ask),
            xids=xids,
            errors=tuple(errors),
        )

    def _steady_reasons(self, ask: Callable[..., Any]) -> int | None:
        """Why clocks were held down at every one of a few looks."""
        steady: int | None = None
        for look in range(_LOOKS):
            reasons = ask(
                "nvmlDeviceGetCurrentClocksThrottleReasons"
            )  # older drivers know this name only
            if reasons is None:
                return None
            steady = reasons if steady is None else steady & reasons
            if not steady:
                break
            time.sleep(_LOOK_S if look < _LOOKS - 1 else 0)
        return steady

    def _recovery_action(self, ask: Callable[..., Any]) -> int | None:
        """What the driver wants done: what XID 154 told, readable afterwards, too. Since driver R565."""
        values = ask("nvmlDeviceGetFieldValues", [_FIELD_RECOVERY_ACTION])
        if not values or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal)

    def _required(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What must be known of a GPU to read any more of it: where it fails, the GPU cannot be used."""
        try:
            return call(*arguments)
        except self._library.NVMLError as error:
            raise (_NotOurs if error.value == _NO_PERMISSION else _Lost)(str(error)) from None

    def _ask(
        self, call: Callable[..., Any] | None, *arguments: Any, errors: list[str] | None = None
    ) -> Any:
        """What ``call`` says; None where it cannot say it. Raises _Lost if the GPU is gone."""
        try:
            return call(*arguments) if call is not None else None
        except self._library.NVMLError as error:
            if error.value == _GPU_IS_LOST:
                raise _Lost(str(error)) from None
            if error.value not in _UNTOLD and errors is not None:
                text = f"{error} ({error.value})"
                errors.extend([text] if text not in errors else [])
            return None


def _import() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NoGpu("nvidia-ml-py is not installed (pip install 'chaoskit[gpu]')") from None
    return pynvml


def read(library: Any = None) -> GpuReading:
    """One reading. A machine without GPUs, without a driver or without ``nvidia-ml-py`` says so in it."""
    try:
        nvml = Nvml(library)
    except NoGpu as error:
        return GpuReading(absent=str(error), broken=error.broken)
    try:
        return nvml.read()
    finally:
        nvml.close()
