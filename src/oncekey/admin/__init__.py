"""What an operator can see and change. The command line (``oncekey.cli``) is the interface to it."""
