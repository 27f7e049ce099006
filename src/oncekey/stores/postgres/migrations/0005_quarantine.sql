-- Works with: schema 0002 (oncekey 0.1.0) and later.
--
-- For how many seconds after the doubt a key of this route cannot be said not to have happened; NULL: 300, the default of
-- Policy(quarantine). A version that does not know this column and starts a key over after its expiry leaves there what
-- the key's last route had said.
ALTER TABLE idempotency_keys ADD COLUMN IF NOT EXISTS quarantine_seconds double precision;
