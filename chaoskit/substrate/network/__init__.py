"""Networks of runs on this machine: namespaces, bridges, and rules that act on packets."""
