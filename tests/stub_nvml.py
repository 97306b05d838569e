"""A C library with the names and types of NVML's, for the real binding to load where there is no driver.

It has two GPUs. Each line of a file is an event, told once: the number of the GPU, and the XID.
After an XID 79 it is lost.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef void *dev;
typedef struct { unsigned field, scope; long long time, latency; int kind, result; unsigned long long value; } field;
typedef struct { dev device; unsigned long long type, data; unsigned gi, ci; } event;
static int told;
static int nth(int wanted, int *gpu, int *xid)
{
    FILE *file = fopen(getenv("STUB_NVML_XIDS"), "r");
    int number = 0, found = 0;
    while (file && !found && fscanf(file, "%d %d\n", gpu, xid) == 2) found = number++ == wanted;
    if (file) fclose(file);
    return found;
}
static int is_lost(dev handle)
{
    int gpu, xid, number = 0;
    while (nth(number++, &gpu, &xid)) if (xid == 79 && handle == (dev)(size_t)(gpu + 1)) return 1;
    return 0;
}
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "stub"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "570.00", size); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, dev *handle) { *handle = (dev)(size_t)(index + 1); return 0; }
int nvmlDeviceGetUUID(dev handle, char *text, unsigned size)
{ strncpy(text, handle == (dev)1 ? "GPU-one" : "GPU-two", size); return 0; }
int nvmlDeviceGetName(dev handle, char *text, unsigned size)
{ if (is_lost(handle)) return 15; strncpy(text, "Stub 80GB", size); return 0; }
int nvmlDeviceGetTemperature(dev handle, int sensor, unsigned *value) { *value = 41; return 0; }
int nvmlDeviceGetTemperatureThreshold(dev handle, int kind, unsigned *value) { *value = 89; return kind == 1 ? 0 : 2; }
int nvmlDeviceGetCurrentClocksThrottleReasons(dev handle, unsigned long long *mask) { *mask = 0x04; return 0; }
int nvmlDeviceGetTotalEccErrors(dev handle, int kind, int counter, unsigned long long *count)
{ *count = counter == 0 ? 0 : 9; return kind == 1 ? 0 : 2; }
int nvmlDeviceGetRemappedRows(dev handle, unsigned *corr, unsigned *unc, unsigned *pending, unsigned *failed)
{ *corr = 1; *unc = 3; *pending = 1; *failed = 0; return 0; }
int nvmlDeviceGetFieldValues(dev handle, int count, field *fields)
{ fields[0].result = fields[0].field == 230 ? 0 : 2; fields[0].value = 0; return 0; }
int nvmlEventSetCreate(void **set) { *set = &told; return 0; }
int nvmlEventSetFree(void *set) { return 0; }
int nvmlDeviceRegisterEvents(dev handle, unsigned long long kinds, void *set) { return kinds == 8 ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, event *found, unsigned timeout_ms)
{
    int gpu, xid;
    for (unsigned waited_ms = 0; !nth(told, &gpu, &xid); waited_ms += 10) {
        if (waited_ms >= timeout_ms) return 10;
        usleep(10000);
    }
    told++;
    found->device = (dev)(size_t)(gpu + 1);
    found->type = 8;
    found->data = xid;
    return 0;
}
"""


def environment(directory: Path, xids: Path) -> dict[str, str]:
    """Of a process whose ``pynvml`` finds this library.

    Skips the test where that cannot be built or loaded.
    """
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py (pip install 'chaoskit[gpu]')")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = directory / "stub.c"
    source.write_text(_SOURCE)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", directory / "libnvidia-ml.so.1", source], check=True
    )
    return {**os.environ, "LD_LIBRARY_PATH": str(directory), "STUB_NVML_XIDS": str(xids)}
