"""The paper's tables and figures as experiments that can be run: what they are, what they cost, how they differ."""
