"""Chaos drill: one training under random faults of every class, compared with a calm run."""
