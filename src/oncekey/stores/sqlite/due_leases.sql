-- Duty "leases", oldest first: in progress, and the lease is over.
SELECT scope, key FROM idempotency_keys
WHERE state = 'in_progress' AND lease_until <= ?1
ORDER BY lease_until, scope, key LIMIT ?2
