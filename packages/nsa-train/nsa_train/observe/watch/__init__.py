"""Health of a run: record tails, history, health checks, watchdog, hang diagnosis, status, smoke test."""
