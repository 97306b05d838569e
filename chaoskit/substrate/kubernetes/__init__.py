"""Substrate ``kubernetes``: the nodes of a run are pods.

* :mod:`.options`: what users choose.
* :mod:`.manifests`: what the objects of a session look like; :mod:`.template`: what users may change of a pod.
* :mod:`.api`: requests to the API server; :mod:`.rights`: which, by which side, and why.
* :mod:`.session`: one session: what it makes, and how that goes again. :mod:`.ending`: its end from outside.
* :mod:`.pods`: the pods of a session; :mod:`.placement`: where; :mod:`.hindrance`: what keeps some from running.
* :mod:`.driver_pod`: a session that a pod drives; :mod:`.port_forward`: the client's stream to it.
* :mod:`.pod_state`, :mod:`.diagnosis`: why a pod does not run.
* :mod:`.substrate`: the nodes of runs, on the pods of a session.
* :mod:`.actions`, :mod:`.backends`: what can be done to pods, and what does it. :mod:`.pod_network`: to their network.
* :mod:`.outside`: what is done to machines and the API server; :mod:`.machines`, :mod:`.levers`, :mod:`.marks`: how.
* :mod:`.installation`, :mod:`.examination`: what an administrator makes, and whether a cluster has it.
"""
