"""Tigon's models in other libraries, which are optional: nothing else of Tigon imports them."""
