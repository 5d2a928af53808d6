"""Adapters of PEFT in a planned model: what PEFT does with shards of layers, and adapters that come after the plan."""
