-- Duty "resumable", oldest first: half done, and the time to resume it has come.
SELECT scope, key FROM idempotency_keys
WHERE state = 'failed_retryable' AND reconcile_at IS NOT NULL AND reconcile_at <= ?1
ORDER BY reconcile_at, scope, key LIMIT ?2
