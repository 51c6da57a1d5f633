"""Records of a run, how they are written and read back: run folder, heartbeat, events. Needs no torch, no engine."""
