"""Token shards on disk or in an object store: written whole, described by a manifest, verified when read."""
