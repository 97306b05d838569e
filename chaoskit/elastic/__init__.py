"""How large the world shall be, and what that does to the learning rate: pure decisions, not yet used by a run."""
