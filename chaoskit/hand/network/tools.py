"""Programs that change the network: ``nft`` and ``tc``.

-> ``hand/network/packet_rules.py`` and ``hand/network/bandwidth.py`` call them.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from ..refusals import Unable

#: A call takes some 5 ms. The limit lies below the one after which the hand counts as stuck.
_CALL_LIMIT_S = 3.0
_SEARCHED = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
#: Parts of error messages, and what would make the act possible.
_REMEDIES = (
    ("Operation not permitted", "start the hand as root with the capability NET_ADMIN"),
    ("must be root", "start the hand as root with the capability NET_ADMIN"),
    ("qdisc kind is unknown", "load the kernel module sch_tbf on the node"),
    ("Operation not supported", "use a node whose kernel has the module that this rule needs"),
    ("No such file or directory", "use a node whose kernel has the module that this rule needs"),
    ("Cannot find device", "name a network interface of the pod"),
)


def run_tool(*command: str, script: str = "") -> str:
    """Run a program, and return its output.

    Args:
        command: the program and its arguments.
        script: text for its standard input.

    Raises:
        Unable: if the program is missing, fails, or does not end within 3 s.
    """
    name = command[0]
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SEARCHED}")
    if path is None:
        raise Unable(f"{name} is not in this image", f"use the image for hands, which has {name}")
    try:
        done = subprocess.run(
            [path, *command[1:]],
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CALL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unable(f"{name} did not end within {_CALL_LIMIT_S:g} s", "try again") from None
    except OSError as error:
        raise Unable(f"{name} cannot be started: {error}", "use the image for hands") from None
    if done.returncode:
        raise _failure(name, done.stderr or done.stdout)
    return done.stdout


def _failure(name: str, output: str) -> Unable:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    message = next((line for line in lines if "rror" in line), lines[0] if lines else "no message")
    remedy = next((text for part, text in _REMEDIES if part in output), "see the message")
    return Unable(f"{name}: {message}", remedy)
