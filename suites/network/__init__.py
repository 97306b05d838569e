"""Tests of a broken network between nodes: cut one way or both, in silence or loudly, slow, lossy.

Every run is judged like those of ``suites.recovery``. While the fault lasts nothing unsafe may
happen (two sides that both commit, a step that is computed twice). Once the network is whole the
full world trains again.

-> coordinator/detectors/contact.py and links.py decide which side goes on.
"""
