"""What the attention costs, beside dense attention, measured in one process, judged, and set against the possible."""
