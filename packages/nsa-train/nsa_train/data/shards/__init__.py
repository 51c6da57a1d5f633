"""Prepared token shards on disk or in an object store: written atomically, listed in a manifest, verified when read."""
