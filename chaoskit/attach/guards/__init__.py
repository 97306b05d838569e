"""Guard rails of faults in jobs that already run: checks before the first fault, and aborts."""
