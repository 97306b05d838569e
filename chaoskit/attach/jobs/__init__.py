"""Jobs that already run on Kubernetes: their places, the pods that hold them, and their changes.

-> ``find.py``: the job of a reference, checked before anything happens. ``watch.py``: its changes.
"""
