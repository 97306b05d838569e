"""The machines below the pods: checks before they are broken, and the means to do it."""
