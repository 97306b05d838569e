"""The connections between the processes of a run: frames, handshakes, messages, leases and addresses."""
