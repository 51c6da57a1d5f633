"""What DCP lacks: whole, verified, atomic checkpoints, and one writer per run. See `folder` for the order of a save."""
