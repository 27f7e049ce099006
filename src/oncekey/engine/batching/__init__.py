"""Group commit: the statements of many callers become few batches, in threads or in the event loop."""
