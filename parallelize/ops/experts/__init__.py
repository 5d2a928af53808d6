"""Tokens to the ranks that have their experts, and back."""
