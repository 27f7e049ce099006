-- A key that a dead letter made unknown becomes pending again, with a full retention for the retried job.
-- ?1-?3 key and owner · ?4 now
UPDATE idempotency_keys SET
    state = 'pending',
    last_error = NULL,
    reconcile_at = NULL,
    reconcile_tries = 0,
    expires_at = max(expires_at, ?4 + retention_seconds)
WHERE scope = ?1 AND key = ?2 AND state = 'unknown' AND owner = ?3
