"""Commands under test in place of chaoskit's own runtime, observed through their output.

-> ``experiment/run/command_run.py``: how one is run. ``experiment/judge/command_judge.py``: how a
run is judged.
"""

from chaoskit.stacks.patterns import LogPatterns

__all__ = ["LogPatterns"]
