"""Weights of a training model, on their way to an inference engine."""
