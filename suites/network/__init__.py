"""The network between the nodes breaks: cut, one way or both, silently or loudly; slow, lossy, narrow.

Every run is judged like those of ``suites.recovery``: while the fault lasts nothing unsafe may happen (two sides that
both commit, a step that is computed twice), and once the network is whole the full world trains again.
"""
