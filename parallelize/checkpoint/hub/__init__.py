"""Hugging Face folders: loading them into a sharded model, and writing them from one."""
