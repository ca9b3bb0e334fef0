"""A deterministic clock: what the rounds of a simulation would take on given devices and links."""
