"""Run folder, heartbeat, events, health checks, monitor and report. Needs neither torch nor the training engine."""
