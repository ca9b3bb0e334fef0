"""What a round costs, as the paper counts it and as sent over the wire."""
