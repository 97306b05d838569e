"""Tests of faults that only a cluster has, such as lost pods.

Every run is judged like those of ``suites.recovery``.

-> substrate/kubernetes/pods/pods.py notices lost pods and replaces them.
"""
