-- Take jobs that are due, and before them those whose worker's lease is over; by row, never by a watermark, so that a
-- job that commits late is found (hazard 10). SKIP LOCKED: two workers that claim at once take different rows.
-- The UPDATE finds the row by its id, not by its place: a row that was renewed, released and so moved between our
-- snapshot and our lock is followed to where it is now.
WITH lapsed AS (
    SELECT i.id FROM idempotency_outbox AS i
    WHERE i.state = 'running' AND i.lease_until <= now() AND i.task = ANY(%(tasks)s)
    ORDER BY i.lease_until
    LIMIT %(limit)s
    FOR NO KEY UPDATE SKIP LOCKED
),

due AS (
    SELECT i.id FROM idempotency_outbox AS i
    WHERE i.state = 'ready' AND i.run_at <= now() AND i.task = ANY(%(tasks)s)
    ORDER BY i.run_at
    LIMIT %(limit)s - (SELECT count(*) FROM lapsed)
    FOR NO KEY UPDATE SKIP LOCKED
),

taken AS (
    SELECT l.id, true AS lapsed FROM lapsed AS l
    UNION ALL
    SELECT d.id, false AS lapsed FROM due AS d
)

UPDATE idempotency_outbox AS j SET
    state = 'running',
    owner = %(owner)s,
    attempt = j.attempt + 1,
    lease_until = now() + %(lease_seconds)s * interval '1 second',
    last_error = CASE WHEN t.lapsed THEN {error} ELSE j.last_error END,
    history = CASE WHEN t.lapsed THEN {history} ELSE j.history END
FROM taken AS t
WHERE j.id = t.id
RETURNING {columns}
