"""Native Sparse Attention: functional form, module, compression, gates, RoPE, document layout and KV cache."""
