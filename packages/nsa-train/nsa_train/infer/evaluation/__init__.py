"""Evaluation: held-out loss by position, far tasks, lm-evaluation-harness."""
