"""ParaVT on Ray: reinforcement learning of vision-language models that crop long videos in parallel."""

__version__ = "0.1.0"
