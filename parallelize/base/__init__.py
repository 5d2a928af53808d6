"""What everything stands on: errors, mesh arithmetic, layouts of shards, files, the terminal, private names of
torch."""
