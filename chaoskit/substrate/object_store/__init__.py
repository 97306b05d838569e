"""Object-store faults, by an HTTP proxy in front of a store."""
