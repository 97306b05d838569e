"""Plays back what NVML said: stands in the place of the module ``pynvml``, which needs a driver."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DIRECTORY = Path(__file__).parent / "recorded" / "nvml"
RECORDINGS = sorted(path.stem for path in DIRECTORY.glob("*.json"))
_TIMEOUT = 10


class RecordedNvml:
    """One recording.

    ``open_sets``: event sets that were made and not freed yet; ``inits``: minus shutdowns.
    """

    class NVMLError(Exception):
        """As of the binding: ``value`` is the nvmlReturn_t."""

        def __init__(self, value: int) -> None:
            self.value = value
            super().__init__(f"NVML error {value}")

    def __init__(self, name: str) -> None:
        self._told = json.loads((DIRECTORY / f"{name}.json").read_text())
        self._events = list(self._told["events"])
        self._looks: dict[tuple[int, str], int] = {}
        self._registered: set[int] = set()
        self.open_sets = self.inits = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self._value(self._told.get("init"))
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.inits -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return str(self._told["driver"])

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._told["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return str(self._told["devices"][handle]["uuid"])

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        self.open_sets += 1
        return object()

    def nvmlEventSetFree(self, events: object) -> None:  # noqa: N802
        self.open_sets -= 1

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:  # noqa: N802
        assert kinds == 0x8
        self._registered.add(handle)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> SimpleNamespace:  # noqa: N802
        if not self._events:
            raise self.NVMLError(_TIMEOUT)
        event = self._events.pop(0)
        assert event["device"] in self._registered, "an event of a device that nobody asked for"
        return SimpleNamespace(device=event["device"], eventType=0x8, eventData=event["xid"])

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        told = self._told["devices"][handle]["calls"]["nvmlDeviceGetFieldValues"]
        self._value(told)
        return [self._field(told[str(field)]) for field in fields]

    def _field(self, told: Any) -> SimpleNamespace:
        failed = isinstance(told, dict)
        return SimpleNamespace(
            nvmlReturn=told["nvml_error"] if failed else 0,
            value=SimpleNamespace(uiVal=0 if failed else told),
        )

    def __getattr__(self, call: str) -> Any:
        if not call.startswith("nvmlDevice"):
            raise AttributeError(call)

        def answer(handle: int, *arguments: Any) -> Any:
            told = self._told["devices"][handle]["calls"][call]
            if isinstance(told, dict) and arguments:
                told = told.get(",".join(map(str, arguments)), told)
            if call == "nvmlDeviceGetCurrentClocksThrottleReasons" and isinstance(told, list):
                look = self._looks[handle, call] = self._looks.get((handle, call), -1) + 1
                told = told[look % len(told)]
            return self._value(told)

        return answer

    def _value(self, told: Any) -> Any:
        if isinstance(told, dict) and "nvml_error" in told:
            raise self.NVMLError(told["nvml_error"])
        return told
