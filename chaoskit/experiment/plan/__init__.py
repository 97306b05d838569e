"""Plans of experiments: checked in full before anything is started, and kept as files."""
