"""Styles: the words that plans use, and the contract of each: sharded parameters, boundary conversions, compute."""
