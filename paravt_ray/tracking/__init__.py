"""Metrics, episodes and progress: what a run leaves behind."""
