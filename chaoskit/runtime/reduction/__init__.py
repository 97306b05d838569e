"""The reduction of gradients over the ranks: in tree order, or by the backend's all-reduce."""
