"""From rewards to the loss, in pure torch."""
