"""Hands for tests, and the processes that they break.

-> ``support/hand/client.py``: the client of a hand; ``support/hand/targets.py``: processes.
"""
