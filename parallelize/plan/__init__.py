"""Plans: strict loading of YAML files, translation of `transformers` plans, and their resolution on a model and a
mesh."""
