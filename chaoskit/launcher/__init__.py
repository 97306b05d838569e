"""Launch of a training: from settings to a result, with a view and a control API."""
