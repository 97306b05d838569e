"""Comparison of a run with plain PyTorch: its losses, its final state, and the distance of correct
runs.
"""
