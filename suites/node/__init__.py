"""Nodes fail as machines do: lost without a word, alone or with their rack, frozen, replaced, short of something.

Every run is judged like those of ``suites.recovery``: nothing is lost while the fault lasts, and where the node comes
back, or has again what it needs, the full world trains again.
"""
