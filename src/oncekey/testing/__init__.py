"""Public tools for tests: suites for stores and frameworks, real servers, a TCP proxy, fault points, a clock."""
