"""A cluster that exists on paper only: a fake clock, fake processes and a network that loses and delays.

The control plane in it is the real one (``chaoskit.coordinator``); coordinators, agents and workers
around it are small models of their shells. Each seed gives one history, the same every time.
``history.py`` runs one.
"""
