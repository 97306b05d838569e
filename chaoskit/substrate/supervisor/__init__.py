"""The supervisor: the process that starts programs on a node, acts on them, and ends them with their runner.

It is the first process of a container, or stands beside the nodes of this host, and adopts whatever loses its parent.
All that it is told and that it tells passes through one stream: a Unix socket, or a TCP connection.

* :mod:`.messages`: what is said on the stream.
* :mod:`.server`: the supervisor itself.
* :mod:`.link`: the runner's end.
* :mod:`.away`: the kernel and the backends of a node that only its stream reaches.
"""
