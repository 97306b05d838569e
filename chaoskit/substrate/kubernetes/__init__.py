"""Substrate ``kubernetes``: the nodes of a run are pods.

* :mod:`.options`: options of users.
* :mod:`.pods.manifests`: objects of a session; :mod:`.template`: the user's changes to its pods.
* :mod:`.api.requests`: requests to the API server; :mod:`.api.rights`: the rights that they need.
* :mod:`.session`: the creation and the end of a session; :mod:`.ending`: its end from outside.
* :mod:`.pods.pods`: the pods of a session; :mod:`.pods.placement`: their machines;
  :mod:`.pods.pod_blocker`: faults that keep pods from running.
* :mod:`.driver_pod`: a session that a pod drives; :mod:`.port_forward`: the client's stream to it.
* :mod:`.pods.state`, :mod:`.pods.diagnosis`: reasons for which a pod does not run.
* :mod:`.substrate`: the nodes of runs, on the pods of a session.
* :mod:`.pods.actions`, :mod:`.backends`: actions on pods, and their backend; :mod:`.pods.network`:
  changes to the network of pods.
* :mod:`.machine_faults`: faults of machines and the API server; :mod:`.machines.machines`,
  :mod:`.machines.machine_commands`, :mod:`.machines.marks`: their means; :mod:`.machine_pods`: the
  pods on a machine.
* :mod:`.installation`, :mod:`.examination`: objects that an administrator creates, and checks of a
  cluster.
"""
