"""What is under test, where that is not chaoskit's own runtime: any command, seen by what it prints."""

from chaoskit.stacks.patterns import LogPatterns

__all__ = ["LogPatterns"]
