-- Duty "lapsed", oldest first: retryable with steps that are done, and past expiry. The client did not retry.
SELECT scope, key FROM idempotency_keys
WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2
