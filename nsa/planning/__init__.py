"""Judgements before money is spent: does this machine compute attention rightly, may this run start."""
