"""The file of a run: its keys, a strict loader, overrides from the command line, a JSON schema. Torch-free."""
