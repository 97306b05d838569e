"""Facts of this machine and its kernel: processes, clocks, ports, and the heartbeat page."""
