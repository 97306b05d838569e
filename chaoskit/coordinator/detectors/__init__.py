"""Detectors of the coordinator: hangs, silent nodes, bad links, clocks, unfit nodes and stragglers.

All are pure, and only find: they give nothing up.

-> coordinator/handlers/ acts on the findings; coordinator/membership/decide.py plans the next
world.
"""
