"""Tests of every fault at every moment: the training comes back, and no slow rank is blamed.

-> coordinator/handlers/on_worker_lost.py: the steps from a loss to the next world.
"""
