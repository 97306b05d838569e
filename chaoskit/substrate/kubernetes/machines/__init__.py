"""The machines below the pods: which ones may be broken, by which commands, cordons and taints."""
