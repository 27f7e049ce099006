"""Events, and how they reach the log, the app's own hook, and exporters of metrics and traces (``registry.py``)."""
