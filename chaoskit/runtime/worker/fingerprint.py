"""Fingerprints of the environment that a worker's numbers depend on, besides seed and data.

Workers with different fingerprints must not train together.

-> coordinator/handlers/on_worker_ready.py gives up a worker with another fingerprint.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version

import torch

from chaoskit.health.compute import floats_digest


def fingerprint(source: str, device: torch.device, *, exact: bool = True) -> str:
    """Return versions, processor and numeric switches, as text that a person can compare.

    Take it when the model is built, because the job may set switches.

    Args:
        source: digest of the job's code, as it was when it was loaded.
        exact: True if the run promises equal bits. The digest of a fixed computation is then
            included.
    """
    facts = {
        "chaoskit": version("chaoskit"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "byte order": sys.byteorder,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "job": source,
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = (
            f"{torch.backends.cudnn.version()} benchmark={torch.backends.cudnn.benchmark}"
        )
    if exact:
        facts["computes"] = floats_digest(str(device))
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())
