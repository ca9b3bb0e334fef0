"""Data sets: the catalogue, readers for their file formats, custom data, partitions over peers, and
batches."""
