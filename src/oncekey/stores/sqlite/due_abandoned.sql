-- Duty "abandoned": its job never settled it, and it is past expiry. Oldest first.
SELECT scope, key FROM idempotency_keys
WHERE state = 'pending' AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2
