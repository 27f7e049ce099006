-- Duty "unknowns", oldest first: the outcome is unknown, and the time to reconcile it has come.
SELECT scope, key FROM idempotency_keys
WHERE state = 'unknown' AND reconcile_at <= ?1
ORDER BY reconcile_at, scope, key LIMIT ?2
