"""Offline preparation (`nsa data prepare`): tokenises a corpus into token shards, resumable, locally or on Slurm."""
