"""The membership of a job: the workers of each generation, their state and their shards."""
