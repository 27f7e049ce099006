-- Delete what due_expired.sql finds, and nothing else: what is in flight, unknown or pending has no expiry (hazard 11).
DELETE FROM idempotency_keys WHERE rowid IN (
    SELECT rowid FROM idempotency_keys
    WHERE (state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL))
      AND expires_at <= ?1
    ORDER BY expires_at, scope, key LIMIT ?2
)
