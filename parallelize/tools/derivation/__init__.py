"""A plan derived from a model: its forward is recorded once, and what may be sharded follows from its operations."""
