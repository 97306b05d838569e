"""Models of the processes of a run: the coordinator, agents and workers."""
