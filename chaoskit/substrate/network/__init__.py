"""Networks of runs on this machine: namespaces, bridges, and rules that drop, delay or shape packets."""
