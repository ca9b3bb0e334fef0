"""Masks of whole channels: units, how many are kept, the small network, averages of blocks."""
