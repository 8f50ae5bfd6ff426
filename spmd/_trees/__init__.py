"""Reads trees: their leaves, the layouts that rules, prefixes and annotations give them."""
