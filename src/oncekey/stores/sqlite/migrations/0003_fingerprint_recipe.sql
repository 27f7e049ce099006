-- Works with: schema 0002 (oncekey 0.1.0) and later.
--
-- Of which parts of the request the fingerprint was made (core/recipe.py); NULL: the default of fingerprint_version. Rows of
-- version 1 have none: an older process that starts a key over writes version 1, and leaves here what was there. It stands
-- behind response_body, but NULL, which it nearly always is, stands in the head of the row.
ALTER TABLE idempotency_keys ADD COLUMN fingerprint_recipe TEXT;
