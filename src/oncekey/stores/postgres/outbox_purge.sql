-- Delete jobs that are done or cancelled for long enough. Dead letters stay until an operator redirects them.
WITH doomed AS (
    SELECT i.id FROM idempotency_outbox AS i
    WHERE i.state IN ('done', 'cancelled') AND i.finished_at <= now() - %(keep_seconds)s * interval '1 second'
    ORDER BY i.finished_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)

DELETE FROM idempotency_outbox AS j
USING doomed AS d
WHERE j.id = d.id
