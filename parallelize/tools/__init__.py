"""What is known of a model before it runs on a cluster: `explain`, `fit` and `lint`, `verify`, derived plans."""
