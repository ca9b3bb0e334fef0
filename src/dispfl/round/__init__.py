"""One round of the algorithm: what it is made of, how peers exchange models, and the round
itself."""
