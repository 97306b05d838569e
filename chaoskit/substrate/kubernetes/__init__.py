"""Substrate ``kubernetes``: the nodes of a run are pods.

* :mod:`.options`: what users choose.
* :mod:`.manifests`: what the objects of a session look like; :mod:`.template`: what users may change of a pod.
* :mod:`.api`: requests to the API server.
* :mod:`.session`: one session: what it makes, and how that goes again.
* :mod:`.substrate`: the nodes of runs, on the pods of a session.
"""
