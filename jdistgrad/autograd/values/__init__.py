"""What JAX sees of the wire: the one primitive, the protocol of what it performs, and trees with holes for arrays.

Uses rpc alone. Everything else in autograd uses it.
"""
