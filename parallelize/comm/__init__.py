"""Communication: meshes and process groups, point-to-point exchanges, the handshake of ranks, the speed of a link."""
