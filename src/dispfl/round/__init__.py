"""One round of the algorithm, the exchange of models in it, and the context of all rounds."""
