"""Engines map the peers' work, nothing else."""
