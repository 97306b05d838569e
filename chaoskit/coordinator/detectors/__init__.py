"""Detectors of the coordinator: hangs, silent nodes, bad links, clocks, unfit nodes and stragglers. All are pure."""
