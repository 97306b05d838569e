"""Substrates: the places that nodes of runs come from, and the faults that they support.

-> ``core/base.py``: the interface. ``registry.py``: which substrates there are. ``faults/``: the
faults. ``experiment/harness.py``: what is done with the nodes.
"""
