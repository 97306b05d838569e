"""Substrate ``kubernetes``: the nodes of a run are pods.

* :mod:`.options`: what users choose.
* :mod:`.pods.manifests`: what the objects of a session look like; :mod:`.template`: what users may change of a pod.
* :mod:`.api.requests`: requests to the API server; :mod:`.api.rights`: which, by which side, and why.
* :mod:`.session`: one session: what it makes, and how that goes again. :mod:`.ending`: its end from outside.
* :mod:`.pods.pods`: the pods of a session; :mod:`.pods.placement`: where; :mod:`.pods.pod_blocker`: what keeps some
  from running.
* :mod:`.driver_pod`: a session that a pod drives; :mod:`.port_forward`: the client's stream to it.
* :mod:`.pods.state`, :mod:`.pods.diagnosis`: why a pod does not run.
* :mod:`.substrate`: the nodes of runs, on the pods of a session.
* :mod:`.pods.actions`, :mod:`.backends`: what can be done to pods, and what does it. :mod:`.pods.network`: to their
  network.
* :mod:`.machine_faults`: what is done to machines and the API server; :mod:`.machines.machines`,
  :mod:`.machines.machine_commands`, :mod:`.machines.marks`: how.
* :mod:`.installation`, :mod:`.examination`: what an administrator makes, and whether a cluster has it.
"""
