-- Duty "abandoned", oldest first: pending and past expiry, because no job has settled the key.
SELECT scope, key FROM idempotency_keys
WHERE state = 'pending' AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2
