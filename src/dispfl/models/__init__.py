"""Built-in networks and the settings that choose one, or a user's own."""
