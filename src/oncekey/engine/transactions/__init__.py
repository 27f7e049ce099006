"""The handler's own database transaction, in which oncekey stores the response: one commit for both."""
