"""The training state of one rank: what is registered, how it is watched, shared, cut into pieces and replaced."""
