"""Where keys are kept: ``api.py`` has the protocols, ``registry.py`` maps a URL to a store, a folder is a store."""
