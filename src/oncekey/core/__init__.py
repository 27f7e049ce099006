"""Pure values and rules: states, records, decisions, policy, fingerprints. No I/O, no clock, no threads.

Start with ``states.py``, the state machine. docs/design.md has the map of all packages.
"""
