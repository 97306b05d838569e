"""The coordinator of a job: pure decisions over messages of nodes and workers, and the server that carries them out."""
