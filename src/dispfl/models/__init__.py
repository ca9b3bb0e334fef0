"""Built-in networks, with GroupNorm throughout: batch statistics harm federated learning (the paper, appendix)."""
