-- Duty "lapsed": retryable with steps that are done, and past expiry: half done, and nobody came back. Oldest first.
SELECT scope, key FROM idempotency_keys
WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2
