"""Protected HTTP requests: ``exchange.py`` decides without I/O, a shell per server protocol moves the bytes.

Each framework is one file or folder with a function ``protect``.
"""
