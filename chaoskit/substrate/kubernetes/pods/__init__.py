"""The pods of a session: their manifests, where they are placed, and why one does not run."""
