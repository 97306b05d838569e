"""Launching a training: from settings to a result, its view, its control API, its list of quarantined nodes."""
