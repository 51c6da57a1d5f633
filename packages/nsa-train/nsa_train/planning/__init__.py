"""Planning: memory, time and price estimates, target hardware, and the preflight rules a run must pass."""
