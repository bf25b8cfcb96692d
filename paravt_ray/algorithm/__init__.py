"""The algorithm: advantages, anchoring, losses, log-probs. Tensors in, tensors out; no Ray, no engine, no DeepSpeed."""
