"""Run records over many sessions: their contents, storage, and comparisons of two sets of them."""
