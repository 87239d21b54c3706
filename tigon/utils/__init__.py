"""Helpers for every package: settings, JSON and YAML files, paths, terminals, random bits."""
