"""Layout of a training state in memory and in files: boxes, arenas, manifests and seals."""
