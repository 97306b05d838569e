"""What the records of a run say: its history, faults, recoveries and findings."""
