"""Substrate ``kubernetes``: the nodes of a run are pods.

* :mod:`.options`: what users choose.
* :mod:`.manifests`: what the objects of a session look like; :mod:`.template`: what users may change of a pod.
* :mod:`.api`: requests to the API server.
* :mod:`.session`: one session: what it makes, and how that goes again. :mod:`.ending`: its end from outside.
* :mod:`.pod_state`: why a pod does not run.
* :mod:`.substrate`: the nodes of runs, on the pods of a session.
* :mod:`.actions`, :mod:`.backends`: what can be done to pods, and what does it.
"""
