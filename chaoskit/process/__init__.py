"""Facts of this machine and its kernel: processes, clocks, ports, and the page of memory that carries heartbeats."""
