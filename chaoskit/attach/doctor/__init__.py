"""Trials of each hand on a throw-away pod, which is made like a pod of a job that already runs."""
