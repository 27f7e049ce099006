-- Duty "leases": in progress, and the lease is over. Oldest first.
SELECT scope, key FROM idempotency_keys
WHERE state = 'in_progress' AND lease_until <= ?1
ORDER BY lease_until, scope, key LIMIT ?2
