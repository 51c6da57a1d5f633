"""Offline preparation (`nsa data prepare`): tokenizes a corpus into token shards, resumable, locally or on Slurm."""
