"""Engines keep the peers' states and run their tasks, on threads or in processes of Ray."""
