"""``python -m benchmarks``: what protection costs, as a ratio to the same app without it, in one run."""
