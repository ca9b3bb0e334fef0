"""What a site needs before its first round: settings, data, network, and the shared spec."""
