"""The transactional training step: shards, commit, restore, user hooks and user collectives."""
