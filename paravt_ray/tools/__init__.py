"""What a model can call: one file a tool (`crop_video.py` is the first), offered by one line of the configuration."""
