-- Duty "resumable": half done, and its time has come for upkeep to go on with it. Oldest first.
SELECT scope, key FROM idempotency_keys
WHERE state = 'failed_retryable' AND reconcile_at IS NOT NULL AND reconcile_at <= ?1
ORDER BY reconcile_at, scope, key LIMIT ?2
