"""What a worker's numbers depend on besides seed and data: two that differ in it must not train together."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version

import torch

from chaoskit.health.compute import floats_digest


def fingerprint(source: str, device: torch.device, *, exact: bool = True) -> str:
    """Versions, processor and numeric switches, as text that a person can compare.

    To be taken when the model is built: the job may set switches.

    Args:
        source: digest of the job's code, as it was when it was loaded.
        exact: the run promises equal bits: a fixed computation must come to the same ones, too.
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
    return ", ".join(f"{name} {value}" for name, value in facts.items())
