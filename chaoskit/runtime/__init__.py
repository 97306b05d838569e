"""Inside a worker: the transactional step, its reduction, its process group and the state it shares with peers."""
