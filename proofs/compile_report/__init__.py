"""Compile reports: every Triton kernel compiled ahead of time for GPUs that are not present, machine code read."""
