"""What was applied to a model: typed records, parameters as DTensors and their local tensors, state dicts, reports."""
