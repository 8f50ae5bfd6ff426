"""Reads jaxprs: which primitives hold others, what the scopes of our calls say, what JAX's errors say; and walks."""
