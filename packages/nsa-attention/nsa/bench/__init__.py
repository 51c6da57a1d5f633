"""Benchmark of NSA beside dense attention: speed, memory, correctness and the roofline limit (`nsa bench`)."""
