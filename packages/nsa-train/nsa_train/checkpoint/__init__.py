"""Atomic, checksummed checkpoints on top of torch.distributed.checkpoint (DCP), with a single-writer lock."""
