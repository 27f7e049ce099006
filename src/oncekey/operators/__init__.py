"""What an operator sees and does, apart from how it is asked for: the command line is one way to it."""
