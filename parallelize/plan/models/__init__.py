"""Models that are named on a command line: a config, a model type, a published size or a function."""
