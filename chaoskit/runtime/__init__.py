"""The code inside a worker: transactional step, reduction, process group, and shared state."""
