"""The parts of the public suite; ``oncekey.testing.store_suite`` puts them together."""
