"""Check of the Triton kernels on the GPU at hand, in a child process, before `auto` takes them; kept on disk."""
