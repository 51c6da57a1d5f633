"""What a run tells the world: its folder, heartbeat, events and their copies. Needs neither torch nor the engine."""
