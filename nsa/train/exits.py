"""How a run ends, by cause; errors carry their own codes (`nsa.errors`)."""

DONE = 0
PREEMPTED = 10
"""Asked to leave; a checkpoint was written and the run can go on."""
HALTED = 11
"""`.HALT` was found; somebody must look before it goes on."""
