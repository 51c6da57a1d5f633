"""What the attention costs, beside dense attention, in one process: measured, judged, and set against what is possible."""
