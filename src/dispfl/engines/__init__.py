"""Engines keep the peers' states and run their tasks: on threads of this process, or in Ray's
processes."""
