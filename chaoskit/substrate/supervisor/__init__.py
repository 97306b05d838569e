"""The supervisor: a process that starts programs on a node, acts on them, and ends them.

It is the first process of a container, or runs beside the nodes of this host. It adopts orphaned
processes, and ends with its runner. All its input and output passes through one stream: a Unix
socket, or a TCP connection.

* :mod:`.messages`: messages on the stream.
* :mod:`.server`: the supervisor itself.
* :mod:`.client`: the runner's end of the stream.
* :mod:`.remote_node`: kernel and backends of a node that is reached only through its supervisor.
* :mod:`.programs`, :mod:`.actions`, :mod:`.socket_relay`: the programs that it starts, the actions
  that it applies, and its injection lines.
* :mod:`.files`, :mod:`.sources`: journals and logs that are copied to the runner, and a job's code
  that is copied to the node.
* :mod:`.reception`: the runner's listening socket for supervisors that dial it.
* :mod:`.resumable_stream`: a stream to a supervisor that survives its connections. :mod:`.stream`:
  keep-alive.
"""
