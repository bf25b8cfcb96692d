"""The DeepSpeed learner."""
