"""Launcher: starts ranks, restarts them after failures, and the network between nodes."""
