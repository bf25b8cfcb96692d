"""Supervised cold start."""
