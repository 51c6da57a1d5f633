"""Monitoring of runs: run folder, heartbeat, events, health checks, exporter, views. Needs neither torch nor OLMo-core."""
