"""What Native Sparse Attention is: block geometry, compression, selection, gates, cache, and the module itself."""
