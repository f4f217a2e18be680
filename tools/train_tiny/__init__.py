"""Trains the small model that is shipped in the package: data, training, export."""
