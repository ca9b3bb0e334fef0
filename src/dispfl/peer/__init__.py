"""The real network: identity, members, transport, node."""
