-- Duty "expired", oldest first: final, or retryable without a step that is done, and past expiry.
SELECT scope, key FROM idempotency_keys
WHERE (state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL))
  AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2
