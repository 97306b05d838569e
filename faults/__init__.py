"""The vocabulary of faults: what is broken, when and where."""
