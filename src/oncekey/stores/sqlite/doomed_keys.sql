-- The keys that the purge deletes, oldest first: final, or retryable without a step that is done, and past expiry.
-- Keys that are in flight, unknown or pending do not expire (hazard 11).
SELECT rowid, scope, key FROM idempotency_keys
WHERE (state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL))
  AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2
