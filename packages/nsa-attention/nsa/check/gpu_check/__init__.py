"""`nsa gpu-check`: correctness and speed of the Triton kernels on a GPU, or a rehearsal on a CPU."""
