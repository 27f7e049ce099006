-- Delete jobs that are done or cancelled for long enough. Dead letters stay until an operator redirects them.
DELETE FROM idempotency_outbox WHERE id IN (
    SELECT id FROM idempotency_outbox
    WHERE state IN ('done', 'cancelled') AND finished_at <= ?1
    ORDER BY finished_at LIMIT ?2
)
