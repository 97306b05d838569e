"""Observation of a run from outside, live or afterwards.

It offers the state in the journals, heartbeats, metrics, traces and a live view.
"""
