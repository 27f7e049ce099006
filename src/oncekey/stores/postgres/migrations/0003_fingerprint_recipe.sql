-- Works with: schema 0002 (oncekey 0.1.0) and later.
--
-- Of which parts of the request the fingerprint was made (core/recipe.py); NULL: the default of fingerprint_version. Rows of
-- version 1 have none: an older process that starts a key over writes version 1, and leaves here what was there.
ALTER TABLE idempotency_keys ADD COLUMN IF NOT EXISTS fingerprint_recipe text;
