"""What the commands are made of: the state of a run as people see it, live views, launching, demonstrating."""
