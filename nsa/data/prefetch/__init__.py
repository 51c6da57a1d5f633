"""Rows to the trainer: a process that prefetches, exact cursors of what was consumed, tensors."""
