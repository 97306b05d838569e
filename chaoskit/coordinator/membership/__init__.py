"""The membership of a job: which workers train in which generation, from which state, with which shards."""
