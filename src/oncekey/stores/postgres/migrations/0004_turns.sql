-- Works with: schema 0002 (oncekey 0.1.0) and later.
--
-- Both indexes are small, but making one reads its whole table, and writes to the table wait for it. On a large
-- one, make them before `oncekey migrate`, with CREATE INDEX CONCURRENTLY: what is there already is left as it is.

-- What upkeep asks the outside world about, by tenant: one tenant's thousands must not keep another's waiting.
CREATE INDEX IF NOT EXISTS idempotency_keys_turns ON idempotency_keys (state, scope, reconcile_at)
WHERE state IN ('unknown', 'failed_retryable') AND reconcile_at IS NOT NULL;

-- The audit has a retention of its own: the reaper finds its oldest lines.
CREATE INDEX IF NOT EXISTS idempotency_audit_at ON idempotency_audit (at);
