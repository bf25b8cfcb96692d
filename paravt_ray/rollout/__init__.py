"""Producing episodes: engines, the agent loop, the fleet of generators."""
