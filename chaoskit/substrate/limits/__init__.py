"""Limits of nodes by control groups: CPU, memory, processes, writes and the freezer; what this machine can do."""
