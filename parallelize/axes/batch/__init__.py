"""What one call of a model is given, described once for every axis."""
