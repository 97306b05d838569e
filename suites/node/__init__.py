"""Tests of nodes that fail as machines do.

Nodes are lost in silence, alone or with their rack, frozen, replaced, or short of a resource. Every
run is judged like those of ``suites.recovery``: nothing is lost while the fault lasts. If the node
comes back, or has its resource again, the full world trains again.

-> coordinator/detectors/contact.py decides when a silent node is lost.
"""
