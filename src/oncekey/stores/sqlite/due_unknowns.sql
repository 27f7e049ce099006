-- Duty "unknowns": the outcome is unknown, and its time to be reconciled has come. Oldest first.
SELECT scope, key FROM idempotency_keys
WHERE state = 'unknown' AND reconcile_at <= ?1
ORDER BY reconcile_at, scope, key LIMIT ?2
