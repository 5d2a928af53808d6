"""Trainers of other libraries around a parallel model: `ParallelTrainer` for `transformers`, and for TRL's SFT."""
