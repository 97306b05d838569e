"""State that outlives a process: its layout, its seals, its copies."""
