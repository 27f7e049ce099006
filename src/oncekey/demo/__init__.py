"""A payments API to try oncekey on: ``oncekey demo``."""
