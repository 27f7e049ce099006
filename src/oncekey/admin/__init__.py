"""The queries and changes of an operator. The command line (``oncekey.cli``) is the interface to them."""
