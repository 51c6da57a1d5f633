"""Chaos drill (`nsa drill --chaos`): one training under random faults of every class, compared with a calm run."""
