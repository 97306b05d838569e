"""The supervisor: the process that starts programs on a node, acts on them, and ends them with their runner.

It is the first process of a container, or stands beside the nodes of this host, and adopts whatever loses its parent.
All that it is told and that it tells passes through one stream: a Unix socket, or a TCP connection.

* :mod:`.messages`: what is said on the stream.
* :mod:`.server`: the supervisor itself.
* :mod:`.client`: the runner's end.
* :mod:`.remote_node`: the kernel and the backends of a node that only its stream reaches.
* :mod:`.programs`, :mod:`.actions`, :mod:`.socket_relay`: what it starts, what it does to nodes, and its injection
  lines.
* :mod:`.files`, :mod:`.sources`: journals and logs on their way here, and a job's code on its way there.
* :mod:`.reception`: where the runner listens for supervisors that dial it.
* :mod:`.resumable_stream`: a stream to a supervisor that outlives the connections which carry it. :mod:`.stream`:
  keep-alive.
"""
