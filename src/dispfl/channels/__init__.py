"""Masks of whole channels and hidden units: units, how many are kept, the small network, averages
of blocks."""
