"""Pushing weights from the learner to the generators."""
