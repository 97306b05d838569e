"""What runs have shown over sessions: records of them, where these are kept, and how two sets of them compare."""
