"""A run, or several side by side, as one HTML file that needs no network, no script and no other file."""
