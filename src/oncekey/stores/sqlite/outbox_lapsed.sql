-- Jobs whose worker's lease is over. ?1 now · ?2 limit · the rest: the names of tasks
SELECT id FROM idempotency_outbox
WHERE state = 'running' AND lease_until <= ?1 AND task IN ({tasks})
ORDER BY lease_until LIMIT ?2
