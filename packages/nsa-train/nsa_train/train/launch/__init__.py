"""Launcher: starts ranks, restarts them after failures, and connects several nodes."""
