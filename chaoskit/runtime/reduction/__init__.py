"""The reduction of gradients over the ranks: in exact tree order, or by the backend's own all-reduce."""
