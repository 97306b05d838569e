"""Connections between the processes of a run: frames, handshakes, messages, leases, addresses."""
