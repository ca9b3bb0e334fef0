"""Data: readers for the standard layouts, splits over peers, and resident batches."""
