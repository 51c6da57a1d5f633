"""Offline: a corpus into verified token shards, restartable, on one machine or on Slurm."""
