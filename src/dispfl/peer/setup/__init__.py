"""What a site needs before its first round: its settings, its data and network, and the spec that
all sites share."""
