"""The methods, one file each: its settings and its arithmetic. `registry.py` lists them."""
