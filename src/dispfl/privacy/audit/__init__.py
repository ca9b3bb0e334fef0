"""The privacy of a finished run, measured by attacks: membership inference, canaries, and what
masks tell."""
