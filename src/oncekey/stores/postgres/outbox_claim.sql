-- Take jobs whose worker's lease is over, and then jobs that are due. It reads rows, without a watermark, so it also
-- finds a job that commits late (hazard 10). SKIP LOCKED: two workers that claim at once take different rows.
-- The UPDATE finds the row by its id, not by its place: if the row was updated between the snapshot and the lock, its
-- place has changed.
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
