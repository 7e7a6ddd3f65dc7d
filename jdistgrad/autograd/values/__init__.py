"""JAX's view of the wire: the one primitive, the protocol of its operations, and trees with holes for arrays."""
