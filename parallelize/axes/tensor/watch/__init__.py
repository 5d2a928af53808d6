"""What the first forward of a planned model must not do: operations that need all of a dim of which a rank has a
shard."""
