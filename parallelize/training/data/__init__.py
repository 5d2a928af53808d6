"""Which samples each rank gets: global batches of any data set that do not depend on the mesh, packed rows, padding."""
