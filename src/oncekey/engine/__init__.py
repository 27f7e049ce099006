"""What an app creates (``once.py``), and how a request begins and ends (``engine.py``).

``operation.py`` is what a handler holds, ``batching/`` is group commit, ``transactions/`` enlists the handler's own
transaction.
"""
