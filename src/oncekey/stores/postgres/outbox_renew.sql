-- Extend the leases of jobs that this owner still holds. It waits for a locked row, which is never locked for long: a
-- skipped row would look like a lost job. Rows are locked in the order of ids, so that two batches cannot deadlock.
WITH held AS (
    SELECT j.id
    FROM (SELECT u.id FROM unnest(%(ids)s) AS u (id) ORDER BY u.id COLLATE "C") AS w
    CROSS JOIN LATERAL (
        SELECT i.id FROM idempotency_outbox AS i
        WHERE i.id = w.id AND i.state = 'running' AND i.owner = %(owner)s
        OFFSET 0
        FOR NO KEY UPDATE
    ) AS j
)

UPDATE idempotency_outbox AS j SET lease_until = now() + %(lease_seconds)s * interval '1 second'
FROM held AS h
WHERE j.id = h.id
RETURNING j.id
