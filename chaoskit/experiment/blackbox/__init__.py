"""Experiments with any command: no hooks, no coordinator, nothing but its processes and its log."""
