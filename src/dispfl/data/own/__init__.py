"""A site's own data: CSV, NPZ, a folder of pictures, or what the site's own function returns."""
