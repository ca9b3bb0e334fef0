"""Live pages about runs and sites: what `dispfl report` draws, updated while it happens."""
