"""Scores of whole episodes."""
