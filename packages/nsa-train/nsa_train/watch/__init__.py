"""Watching a run by its records: health checks, watchdog, exporter, monitor, report. Needs no torch, no engine."""
