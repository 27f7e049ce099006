-- Works with: schema 0002 (oncekey 0.1.0) and later.
--
-- What upkeep asks the outside world about, by tenant: one tenant's thousands must not keep another's waiting.
CREATE INDEX IF NOT EXISTS idempotency_keys_turns ON idempotency_keys (state, scope, reconcile_at)
    WHERE state IN ('unknown', 'failed_retryable') AND reconcile_at IS NOT NULL;

-- The audit has a retention of its own: the reaper finds its oldest lines.
CREATE INDEX IF NOT EXISTS idempotency_audit_at ON idempotency_audit (at);
