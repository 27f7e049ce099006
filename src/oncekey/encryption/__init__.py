"""Encryption at rest: what a store keeps of requests and responses is readable only with the app's keyring.

``OnceKey(url, scope=…, encryption=Keyring.from_env("ONCEKEY_KEYS"))``. docs/encryption.md says what is encrypted.
"""

from __future__ import annotations

from oncekey.encryption.keyring import Keyring as Keyring
