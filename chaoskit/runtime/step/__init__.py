"""The transactional step of a training: shards, commit, restore, and the hooks and collectives of user code."""
