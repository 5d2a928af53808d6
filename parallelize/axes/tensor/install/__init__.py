"""Puts a resolved plan into the modules of a model: forwards, parameters, adapters, and what is added or replaced
later."""
