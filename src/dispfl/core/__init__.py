"""The algorithm as pure functions on flat tensors, with the paper's equations beside them."""
