-- Delete jobs that are over for long enough, at most so many. Dead letters stay until somebody has looked.
DELETE FROM idempotency_outbox WHERE id IN (
    SELECT id FROM idempotency_outbox
    WHERE state IN ('done', 'cancelled') AND finished_at <= ?1
    ORDER BY finished_at LIMIT ?2
)
