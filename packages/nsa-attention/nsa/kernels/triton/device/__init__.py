"""Device code: `@triton.jit` kernels and helpers, launched by the modules beside this package."""
