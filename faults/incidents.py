"""Reasons why large training runs stop in the real world, as counted by two published tables.

This module is the only place for these numbers. Faults name the rows that they stand for
(``Fault.counted``). Shares are as printed in the sources, and not recomputed: those of the first
table add up to 94.9 %, and its first row (148 of 419, printed as 30.1 %) does not fit its own
count. Use counts or shares, never both together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Study:
    """A publication that counts incidents.

    Attributes:
        name: short name, for the column of a table.
        title: title of the publication.
        counted: description of the incidents that were counted.
    """

    name: str
    title: str
    counted: str


@dataclass(frozen=True, slots=True)
class IncidentKind:
    """A row of a study's table.

    Attributes:
        study: the study.
        name: the incident, in words.
        count: number of incidents.
        percent: the printed share, in percent.
        together: the share was printed for several rows as one; ``percent`` repeats it in each.
        missing: the part of it that no fault reproduces yet; "" if no part is known.
    """

    study: Study
    name: str
    count: int
    percent: float
    together: bool = False
    missing: str = ""

    @property
    def share(self) -> str:
        """The printed share in words."""
        if not self.together:
            return f"{self.percent:.1f} %"
        rows = sum(row.together and row.study == self.study for row in INCIDENTS)
        return f"{self.percent:.1f} % for {rows} rows together"

    def __str__(self) -> str:
        return f"{self.study.name}: {self.name}, {self.count:,} ({self.share})"


LLAMA_3 = Study(
    "Llama 3",
    "The Llama 3 Herd of Models, table 5 (Meta, 2024)",
    "419 unexpected interruptions of one training run in 54 days, on up to 16,384 GPUs",
)
BYTE_ROBUST = Study(
    "ByteRobust",
    "Robust LLM Training Infrastructure at ByteDance (SOSP 2025)",
    "incidents of 778,135 jobs in three months",
)

_DEVICE = "a device that vanishes or errs below a living process: needs a GPU"
_MOUNT = "a file system that cannot be mounted, before the job begins"
_OUTSIDE = "services that the job depends on"

GPU = IncidentKind(LLAMA_3, "faulty GPU, NVLink included", 148, 30.1, missing=_DEVICE)
HBM = IncidentKind(LLAMA_3, "GPU memory (HBM)", 72, 17.2, missing=_DEVICE)
SOFTWARE = IncidentKind(LLAMA_3, "software bug", 54, 12.9)
SWITCH = IncidentKind(LLAMA_3, "network switch or cable", 35, 8.4)
MAINTENANCE = IncidentKind(LLAMA_3, "host maintenance", 32, 7.6)
SRAM = IncidentKind(LLAMA_3, "GPU SRAM", 19, 4.5, missing=_DEVICE)
GPU_PROCESSOR = IncidentKind(LLAMA_3, "GPU system processor", 17, 4.1)
NIC = IncidentKind(LLAMA_3, "network card", 7, 1.7)
WATCHDOG = IncidentKind(LLAMA_3, "watchdog timeout of a collective", 7, 1.7)
CORRUPTION = IncidentKind(LLAMA_3, "silent data corruption", 6, 1.4)
THERMAL = IncidentKind(LLAMA_3, "thermal interface or sensor", 6, 1.4)
SSD = IncidentKind(LLAMA_3, "SSD", 3, 0.7)
POWER = IncidentKind(LLAMA_3, "power supply", 3, 0.7)
CHASSIS = IncidentKind(LLAMA_3, "server chassis", 2, 0.5)
IO_BOARD = IncidentKind(LLAMA_3, "IO expansion board", 2, 0.5)
DEPENDENCY = IncidentKind(LLAMA_3, "dependency", 2, 0.5, missing=_OUTSIDE)
CPU = IncidentKind(LLAMA_3, "CPU", 2, 0.5)
SYSTEM_MEMORY = IncidentKind(LLAMA_3, "system memory", 2, 0.5)

CUDA_ERROR = IncidentKind(BYTE_ROBUST, "CUDA error", 19_968, 36.1, missing=_DEVICE)
CPU_OVERLOAD = IncidentKind(BYTE_ROBUST, "CPU overload", 6_095, 11.0)
CPU_OOM = IncidentKind(BYTE_ROBUST, "host memory used up (CPU OOM)", 5_567, 10.1)
DISK_FULL = IncidentKind(BYTE_ROBUST, "disk full", 2_755, 5.0)
INFINIBAND = IncidentKind(BYTE_ROBUST, "InfiniBand", 1_599, 2.9)
MOUNT = IncidentKind(BYTE_ROBUST, "mount", 1_176, 2.1, missing=_MOUNT)
HDFS = IncidentKind(BYTE_ROBUST, "HDFS", 1_104, 2.0, missing=_OUTSIDE)
CONTAINER = IncidentKind(BYTE_ROBUST, "container", 781, 1.4)
KERNEL_PANIC = IncidentKind(BYTE_ROBUST, "kernel panic", 203, 1.1, together=True)
GPU_MEMORY = IncidentKind(BYTE_ROBUST, "GPU memory", 188, 1.1, together=True, missing=_DEVICE)
SERVICE = IncidentKind(BYTE_ROBUST, "external service", 128, 1.1, together=True, missing=_OUTSIDE)
GPU_LOST = IncidentKind(BYTE_ROBUST, "GPU lost", 76, 1.1, together=True, missing=_DEVICE)
DISK_FAULT = IncidentKind(BYTE_ROBUST, "disk fault", 47, 1.1, together=True)
HANG = IncidentKind(BYTE_ROBUST, "hang, without any error", 5_506, 9.9)
SLOW = IncidentKind(BYTE_ROBUST, "slower training (MFU decline)", 442, 0.8)
NAN = IncidentKind(BYTE_ROBUST, "NaN", 148, 0.3)
CHANGE = IncidentKind(
    BYTE_ROBUST,
    "restart by hand, for changed code or data",
    9_582,
    17.3,
    missing="a wanted restart, and no fault",
)

#: Every row of both tables, in their order.
INCIDENTS: tuple[IncidentKind, ...] = (
    GPU,
    HBM,
    SOFTWARE,
    SWITCH,
    MAINTENANCE,
    SRAM,
    GPU_PROCESSOR,
    NIC,
    WATCHDOG,
    CORRUPTION,
    THERMAL,
    SSD,
    POWER,
    CHASSIS,
    IO_BOARD,
    DEPENDENCY,
    CPU,
    SYSTEM_MEMORY,
    CUDA_ERROR,
    CPU_OVERLOAD,
    CPU_OOM,
    DISK_FULL,
    INFINIBAND,
    MOUNT,
    HDFS,
    CONTAINER,
    KERNEL_PANIC,
    GPU_MEMORY,
    SERVICE,
    GPU_LOST,
    DISK_FAULT,
    HANG,
    SLOW,
    NAN,
    CHANGE,
)
