"""What can be known of a plan on a mesh without running it: `lint`, `explain` and `fit`."""
