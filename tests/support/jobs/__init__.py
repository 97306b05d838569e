"""Jobs of Kubernetes for tests: objects, recordings, and a stand-in for controllers of JobSets."""
