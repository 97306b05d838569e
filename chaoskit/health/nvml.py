"""Reading of GPUs through NVML, if ``nvidia-ml-py`` (module ``pynvml``) is installed.

-> ``health/gpu.py``: judges the reading. ``daemon/node_check.py``: watches the XIDs in a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from chaoskit.errors import ChaoskitError
from chaoskit.health.gpu import Device, GpuReading

# nvml.h: nvmlReturn_t. The numbers are the interface of the C library; the binding has a class for
# each.
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND = 9, 12
_NO_PERMISSION, _GPU_IS_LOST, _RESET_REQUIRED = 4, 15, 16
# argument, support, permission, not found, no such function, no data, version
_UNSUPPORTED = {2, 3, 4, 6, 13, 21, 25}
_UNCORRECTED, _VOLATILE, _AGGREGATE = 1, 0, 1
_TEMPERATURE, _SLOWDOWN = 0, 1
_DOUBLE_BIT = 1
_MULTIPLE_SINGLE_BIT = 0
_FIELD_RECOVERY_ACTION = 230
_EVENT_XID = 0x8

# hardware slowdown is reported for a moment when clocks change, too (DCGM, field constants)
_LOOKS = 3
_LOOK_S = 0.01
_EVENTS_MAX = 1000  # at a time: bounds the work for a GPU that reports without end


class NoGpu(ChaoskitError):
    """NVML cannot be used on this machine.

    Attributes:
        broken: True if a driver is installed, but does not work.
    """

    def __init__(self, reason: str, *, broken: bool = False) -> None:
        self.broken = broken
        super().__init__(reason)


class _Lost(ChaoskitError):
    """The GPU no longer answers."""


class _NotPermitted(ChaoskitError):
    """The GPU exists, and this process may not use it."""


class Nvml:
    """Initialised NVML library, which must be closed.

    Args:
        library: the module ``pynvml``, or a recording of its answers.

    Raises:
        NoGpu: if the library or the driver is missing, or does not work.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else _import()
        self._event_set: Any = None
        self._xids: dict[str, list[int]] = {}  # by UUID of the GPU; "" if that is unknown
        try:
            self._library.nvmlInit()
        except self._library.NVMLError as error:
            broken = error.value not in (_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND)
            raise NoGpu(f"NVML: {error}", broken=broken) from None
        self._watch_xids()

    def close(self) -> None:
        """Free the resources of NVML. No error is raised."""
        try:
            if self._event_set is not None:
                self._library.nvmlEventSetFree(self._event_set)
            self._library.nvmlShutdown()
        except self._library.NVMLError:
            pass  # the driver is gone, with all its resources

    def _watch_xids(self) -> None:
        """Register for the XIDs of all GPUs. NVML reports only XIDs after this."""
        library = self._library
        try:
            self._event_set = library.nvmlEventSetCreate()
            for index in range(library.nvmlDeviceGetCount()):
                self._ask(self._register_for_xids, index)
        except (library.NVMLError, _Lost):
            return  # the reading of the devices reports the problem

    def _register_for_xids(self, index: int) -> None:
        """Register for the XIDs of one GPU."""
        handle = self._library.nvmlDeviceGetHandleByIndex(index)
        self._library.nvmlDeviceRegisterEvents(handle, _EVENT_XID, self._event_set)

    def await_xid(self, wait_s: float) -> bool:
        """Sleep until an XID comes, ``wait_s`` at most. Return True if there was any.

        The next :meth:`read` returns it. Returns False at once if NVML reports a lost GPU.
        """
        if self._event_set is None:
            time.sleep(wait_s)
            return False
        return self._drain_xids(wait_s)

    def _drain_xids(self, wait_s: float = 0.0) -> bool:
        """Collect the XIDs that have come. Return True if there were any.

        Args:
            wait_s: longest time to wait for the first of them.
        """
        drained = 0
        while self._event_set is not None and drained < _EVENTS_MAX:
            try:
                event = self._library.nvmlEventSetWait_v2(
                    self._event_set, 0 if drained else int(wait_s * 1000)
                )
            except self._library.NVMLError:
                break  # a time-out: there are no more; or the GPU is lost, which its reading shows
            uuid = self._text_of(self._library.nvmlDeviceGetUUID, event.device)
            self._xids.setdefault(uuid, []).append(int(event.eventData))
            drained += 1
        return bool(drained)

    def _text_of(self, call: Callable[[Any], str], handle: Any) -> str:
        """Return the result of ``call`` on a GPU as text; "" if NVML raises an error."""
        try:
            return str(call(handle))
        except self._library.NVMLError:
            return ""

    def read(self) -> GpuReading:
        """Return a reading of all GPUs, with every XID since NVML was opened.

        GPUs that this process may not use are left out. If NVML fails, the reading has the reason.
        XIDs of a GPU that is not listed any more are in a further reading, of a lost GPU.
        """
        library = self._library
        try:
            driver, count = str(library.nvmlSystemGetDriverVersion()), library.nvmlDeviceGetCount()
        except library.NVMLError as error:
            return GpuReading(absent=f"NVML: {error}", broken=True)
        self._drain_xids()
        xids = dict(self._xids)
        devices = tuple(
            device for index in range(count) if (device := self._device(index, xids)) is not None
        )
        orphans = tuple(number for numbers in xids.values() for number in numbers)
        if orphans:  # XIDs of a GPU that is not listed any more
            devices += (Device(index=count, lost=True, xids=orphans),)
        return GpuReading(driver=driver, devices=devices)

    def _device(self, index: int, xids: dict[str, list[int]]) -> Device | None:
        """Return the reading of one GPU, and remove its XIDs from ``xids``.

        Return None for a GPU that this process may not use.
        """
        uuid, own_xids = "", tuple[int, ...]()
        try:
            handle = self._required(self._library.nvmlDeviceGetHandleByIndex, index)
            uuid = str(self._required(self._library.nvmlDeviceGetUUID, handle))
            own_xids = tuple(xids.pop(uuid, ()))
            return self._read(index, handle, uuid, own_xids)
        except _Lost:
            return Device(index=index, uuid=uuid, lost=True, xids=own_xids)
        except _NotPermitted:
            return None

    def _read(self, index: int, handle: Any, uuid: str, xids: tuple[int, ...]) -> Device:
        """Return the reading of a GPU that answers. Raise _Lost if it stops to answer."""
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
        """Return the bits of the reasons that held the clocks down in all of a few looks.

        Return None if the GPU does not report reasons.
        """
        steady: int | None = None
        for look in range(_LOOKS):
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")  # older drivers' name
            if reasons is None:
                return None
            steady = reasons if steady is None else steady & reasons
            if not steady:
                break
            time.sleep(_LOOK_S if look < _LOOKS - 1 else 0)
        return steady

    def _recovery_action(self, ask: Callable[..., Any]) -> int | None:
        """Return the number of the action that the driver asks for, as XID 154 does.

        Return None for a driver before R565, which does not report it.
        """
        values = ask("nvmlDeviceGetFieldValues", [_FIELD_RECOVERY_ACTION])
        if not values or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal)

    def _required(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call without which the GPU cannot be used.

        Raise _NotPermitted if this process may not use the GPU, and _Lost at any other error.
        """
        try:
            return call(*arguments)
        except self._library.NVMLError as error:
            raise (_NotPermitted if error.value == _NO_PERMISSION else _Lost)(str(error)) from None

    def _ask(
        self, call: Callable[..., Any] | None, *arguments: Any, errors: list[str] | None = None
    ) -> Any:
        """Return the result of ``call``; None if it is unsupported or fails.

        An error that is neither a lack of support nor of permission is added to ``errors``, once.
        Raise _Lost if the GPU is gone.
        """
        try:
            return call(*arguments) if call is not None else None
        except self._library.NVMLError as error:
            if error.value == _GPU_IS_LOST:
                raise _Lost(str(error)) from None
            if error.value not in _UNSUPPORTED and errors is not None:
                text = f"{error} ({error.value})"
                errors.extend([text] if text not in errors else [])
            return None


def _import() -> Any:
    """Return the module ``pynvml``. Raise NoGpu if it is not installed."""
    try:
        import pynvml
    except ImportError:
        raise NoGpu("nvidia-ml-py is not installed (pip install 'chaoskit[gpu]')") from None
    return pynvml


def read(library: Any = None) -> GpuReading:
    """Open NVML, and return one reading of all GPUs.

    On a machine without GPUs, driver or ``nvidia-ml-py``, the reading has the reason.
    """
    try:
        nvml = Nvml(library)
    except NoGpu as error:
        return GpuReading(absent=str(error), broken=error.broken)
    try:
        return nvml.read()
    finally:
        nvml.close()
