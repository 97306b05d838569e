"""The pods of a session: their objects, life cycle, network, and faults."""
