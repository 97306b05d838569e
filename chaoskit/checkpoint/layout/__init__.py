"""The layout of a training state in memory and in files: boxes of tensors, arenas, manifests and seals."""
