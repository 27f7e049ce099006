-- Jobs that are due. ?1 now · ?2 limit · the rest: the names of tasks
SELECT id FROM idempotency_outbox
WHERE state = 'ready' AND run_at <= ?1 AND task IN ({tasks})
ORDER BY run_at LIMIT ?2
