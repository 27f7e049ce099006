"""A payments API to try oncekey on: ``oncekey demo``."""

DEFAULT_STORE = "sqlite:///oncekey-demo.db"
