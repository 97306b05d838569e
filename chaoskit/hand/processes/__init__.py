"""The role on processes: kills, stops and duty cycles, by signals and by ptrace.

-> ``hand/processes/operations.py`` has the operations.
"""
