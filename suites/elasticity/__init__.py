"""Tests of worlds that change their size again and again, with faults in between.

Every run is judged like those of ``suites.recovery``: no step is lost, no sample is left out or
taken twice, and all numbers are those of the unbroken run. ``CHAOSKIT_SPOT_TRACE=FILE`` runs a
trace of your own, in one of the formats of :mod:`chaoskit.elastic.traces`.

-> elastic/policy.py decides on the size of the world and its nodes.
"""
