"""Ops that communicate: collectives with their adjoints, the all-to-all of Ulysses, the replay cache, the dispatcher
library."""
