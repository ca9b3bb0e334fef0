"""`dispfl peer doctor`: checks a site, its machine, and its members."""
