"""The coordinator of a job: pure decisions over messages, and the server that carries them out."""
