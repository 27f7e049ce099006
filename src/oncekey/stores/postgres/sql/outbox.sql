-- Jobs.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: outbox_claim
-- Take jobs for a worker (outbox_taken). The last column is the scope after which the next turns begin.
WITH RECURSIVE {taken}

SELECT c.*, ({next_turn}) FROM claimed AS c

-- name: outbox_columns
-- The columns of a Job, in the order in which stores/sql/outbox_rows.py reads them; `j` is the row.
j.id, j.scope, j.key, j.key_owner, j.operation, j.task, j.payload, j.downstream_key, j.settles, j.state, j.attempt,
j.owner, date_part('epoch', j.lease_until), date_part('epoch', j.run_at), j.provider_id, j.last_error, j.history,
date_part('epoch', j.created_at), date_part('epoch', j.finished_at), date_part('epoch', now())

-- name: outbox_conclude
-- End attempts (outbox_ended). If a job is not returned, its worker had lost it.
WITH {ended}

SELECT e.id, e.owner FROM ended AS e

-- name: outbox_deferred_to
-- The job that the request of an owner token was deferred to.
SELECT {columns} FROM idempotency_outbox AS j
WHERE j.scope = %(scope)s AND j.key = %(key)s AND j.key_owner = %(owner)s AND j.settles
LIMIT 1

-- name: outbox_ended
-- End attempts: each job that still is running under its owner token, and the key that it settles, if the key still is
-- pending under the token of the attempt that enqueued the job.
-- Jobs are locked first, in the order of their ids, and keys after them; outbox_time_out does the same.
-- Rows are found by their primary keys alone. The conditions on state and owner are outside of the subqueries, and look at
-- the locked row: inside, the planner may read all running jobs, or all pending keys, for every row that it looks for.
-- The owner stays in the row: a worker that did not get the answer sees by it that its own write succeeded.
wanted AS (
    SELECT * FROM unnest(
        %(id)s, %(ended_by)s, %(ending)s, %(retry_in)s, %(error)s,
        %(settle)s, %(status)s, %(headers)s, %(body)s, %(schema_version)s
    ) AS w (id, owner, ending, retry_in, error, settle, status, headers, body, schema_version)
),

held AS (
    SELECT w.*
    FROM (SELECT * FROM wanted ORDER BY id COLLATE "C") AS w
    CROSS JOIN LATERAL (
        SELECT i.state, i.owner FROM idempotency_outbox AS i
        WHERE i.id = w.id
        OFFSET 0
        FOR NO KEY UPDATE
    ) AS j
    WHERE j.state = 'running' AND j.owner = w.owner
),

ended AS (
    UPDATE idempotency_outbox AS j SET
        state = CASE WHEN w.ending IN ('done', 'dead') THEN w.ending ELSE 'ready' END,
        attempt = CASE WHEN w.ending = 'release' THEN j.attempt - 1 ELSE j.attempt END,
        lease_until = NULL,
        run_at = CASE WHEN w.ending = 'retry' THEN now() + w.retry_in * interval '1 second' ELSE j.run_at END,
        last_error = CASE WHEN w.ending = 'release' THEN j.last_error ELSE w.error END,
        history = CASE WHEN w.error IS NULL THEN j.history ELSE {history} END,
        finished_at = CASE WHEN w.ending IN ('done', 'dead') THEN now() END
    FROM held AS w
    WHERE j.id = w.id
    RETURNING j.id, j.owner, j.scope, j.key, j.key_owner, j.settles, w.settle, w.error,
        w.status, w.headers, w.body, w.schema_version
),

owed AS (
    SELECT e.*
    FROM ended AS e
    CROSS JOIN LATERAL (
        SELECT i.state, i.owner FROM idempotency_keys AS i
        WHERE i.scope = e.scope AND i.key = e.key
        OFFSET 0
        FOR NO KEY UPDATE
    ) AS k
    WHERE e.settles AND e.settle IS NOT NULL AND k.state = 'pending' AND k.owner = e.key_owner
),

settled AS (
    UPDATE idempotency_keys AS k SET
        state = e.settle,
        response_status = e.status,
        response_headers = e.headers,
        response_body = e.body,
        response_schema_version = e.schema_version,
        last_error = CASE WHEN e.settle = 'unknown' THEN e.error END,
        reconcile_at = CASE WHEN e.settle = 'unknown' THEN now() END,
        lease_until = CASE WHEN e.settle = 'unknown' THEN now() ELSE k.lease_until END,
        finished_at = CASE WHEN e.settle IN ('completed', 'failed') THEN now() END,
        expires_at = CASE
            WHEN e.settle IN ('completed', 'failed')
                THEN greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
            ELSE k.expires_at
        END
    FROM owed AS e
    WHERE k.scope = e.scope AND k.key = e.key
)

-- name: outbox_enqueue
-- One job, in the transaction of the request that adds it: the job exists if and only if that transaction commits.
-- It runs on connections of any driver: placeholders are :name, and CAST gives the types.
INSERT INTO idempotency_outbox (
    id, scope, key, key_owner, operation, task, payload, downstream_key, settles, run_at
) VALUES (
    CAST(:id AS text), CAST(:scope AS text), CAST(:key AS text), CAST(:key_owner AS text), CAST(:operation AS text),
    CAST(:task AS text), CAST(:payload AS text), CAST(:downstream_key AS text), CAST(:settles AS boolean),
    coalesce(to_timestamp(CAST(:run_at AS double precision)), clock_timestamp())
)

-- name: outbox_health
SELECT
    (
        SELECT count(*)
        FROM (SELECT FROM idempotency_outbox WHERE state = 'ready' AND run_at <= now() LIMIT {counted}) AS r
    ),
    coalesce(date_part('epoch', now() - (
        SELECT run_at FROM idempotency_outbox
        WHERE state = 'ready' AND run_at <= now()
        ORDER BY run_at
        LIMIT 1
    )), 0),
    (SELECT count(*) FROM (SELECT FROM idempotency_outbox WHERE state = 'dead' LIMIT {counted}) AS d)

-- name: outbox_history
-- The history with one more failed attempt. `j` is the row as it was, {error} the error. The oldest are dropped first.
(
    CASE
        WHEN jsonb_array_length(j.history::jsonb) >= {kept} THEN j.history::jsonb - 0
        ELSE j.history::jsonb
    END
    || jsonb_build_array(
        jsonb_build_object('attempt', j.attempt, 'at', date_part('epoch', now()), 'error', {error})
    )
)::text

-- name: outbox_job
SELECT {columns} FROM idempotency_outbox AS j WHERE j.id = %(id)s

-- name: outbox_jobs
-- Jobs in one state, oldest first. The state is part of the text, so that PostgreSQL can use its partial index.
SELECT {columns} FROM idempotency_outbox AS j
WHERE j.state = '{state}'
ORDER BY j.{since}
LIMIT %(limit)s

-- name: outbox_jobs_of
-- The jobs of one key, oldest first.
SELECT {columns} FROM idempotency_outbox AS j
WHERE j.scope = %(scope)s AND j.key = %(key)s
ORDER BY j.created_at, j.id
LIMIT %(limit)s

-- name: outbox_next_turn
-- The scope after which the next turns begin: the last one here, or from the start if no scope is left.
SELECT CASE WHEN max(t.due) >= %(shared)s OR max(t.number) >= {visited} THEN max(t.scope) END FROM turns AS t

-- name: outbox_provider
UPDATE idempotency_outbox SET provider_id = %(provider_id)s
WHERE id = %(id)s AND state = 'running' AND owner = %(owner)s

-- name: outbox_purge
-- Delete jobs that are done or cancelled for long enough. Dead letters stay until an operator redirects them. The job
-- that an unknown key was deferred to stays as well: it is the proof that the request itself is done.
WITH doomed AS (
    SELECT i.id FROM idempotency_outbox AS i
    WHERE
        i.state IN ('done', 'cancelled') AND i.finished_at <= now() - %(keep_seconds)s * interval '1 second'
        AND NOT (i.settles AND EXISTS (
            SELECT FROM idempotency_keys AS k
            WHERE k.scope = i.scope AND k.key = i.key AND k.state = 'unknown' AND k.owner = i.key_owner
        ))
    ORDER BY i.finished_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)

DELETE FROM idempotency_outbox AS j
USING doomed AS d
WHERE j.id = d.id

-- name: outbox_redirect
-- An operator retries or discards a dead letter. A retried job starts at attempt 0. If this dead letter made its key
-- unknown, the key becomes pending again, with a full retention for the retried job.
WITH held AS (
    SELECT i.id FROM idempotency_outbox AS i WHERE i.id = %(id)s AND i.state = 'dead' FOR NO KEY UPDATE
),

moved AS (
    UPDATE idempotency_outbox AS j SET
        state = %(to_state)s::text,
        attempt = CASE WHEN %(to_state)s::text = 'ready' THEN 0 ELSE j.attempt END,
        owner = NULL,
        run_at = CASE WHEN %(to_state)s::text = 'ready' THEN now() ELSE j.run_at END,
        finished_at = CASE WHEN %(to_state)s::text = 'ready' THEN NULL ELSE now() END
    FROM held AS h
    WHERE j.id = h.id AND j.state = 'dead'
    RETURNING j.*
),

reopened AS (
    UPDATE idempotency_keys AS k SET
        state = 'pending',
        last_error = NULL,
        reconcile_at = NULL,
        reconcile_tries = 0,
        expires_at = greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
    FROM moved AS m
    WHERE
        m.settles AND m.state = 'ready'
        AND k.scope = m.scope AND k.key = m.key AND k.state = 'unknown' AND k.owner = m.key_owner
),

noted AS (
    INSERT INTO idempotency_audit (who, event, scope, key, job_id, before, after, why)
    SELECT %(who)s::text, %(event)s::text, m.scope, m.key, m.id, 'dead', m.state, %(why)s::text FROM moved AS m
)

SELECT {columns} FROM moved AS j

-- name: outbox_renew
-- Extend the leases of jobs that this owner still holds. It waits for a locked row, which is never locked for long: a
-- skipped row would look like a lost job. Rows are locked in the order of ids, so that two batches cannot deadlock.
-- They are found by id alone, as in outbox_ended.
WITH held AS (
    SELECT j.id
    FROM (SELECT u.id FROM unnest(%(ids)s) AS u (id) ORDER BY u.id COLLATE "C") AS w
    CROSS JOIN LATERAL (
        SELECT i.id, i.state, i.owner FROM idempotency_outbox AS i
        WHERE i.id = w.id
        OFFSET 0
        FOR NO KEY UPDATE
    ) AS j
    WHERE j.state = 'running' AND j.owner = %(owner)s
)

UPDATE idempotency_outbox AS j SET lease_until = now() + %(lease_seconds)s * interval '1 second'
FROM held AS h
WHERE j.id = h.id
RETURNING j.id

-- name: outbox_taken
-- Take jobs whose worker's lease is over, and then jobs that are due. It reads rows, without a watermark, so it also
-- finds a job that commits late (hazard 10). SKIP LOCKED: two workers that claim at once take different rows.
-- Of the jobs that are due, a shared part is taken in turns by scope, one scope after the other: one probe of the index
-- for each scope, for any number of jobs. The rest are the oldest. fair says >= and <= instead of =, so that only the
-- index of turns can give the order: with = the planner may read all due jobs in the order of run_at, for every scope.
-- The UPDATE finds the row by its id, not by its place: if the row was updated between the snapshot and the lock, its
-- place has changed.
lapsed AS (
    SELECT i.id FROM idempotency_outbox AS i
    WHERE i.state = 'running' AND i.lease_until <= now() AND i.task = ANY(%(tasks)s){not_ended}
    ORDER BY i.lease_until
    LIMIT %(limit)s
    FOR NO KEY UPDATE SKIP LOCKED
),

turns AS (
    (
        SELECT i.scope, (i.run_at <= now())::integer AS due, 1 AS number FROM idempotency_outbox AS i
        WHERE i.state = 'ready' AND i.scope > %(after)s AND %(shared)s > 0
        ORDER BY i.scope, i.run_at
        LIMIT 1
    )
    UNION ALL
    SELECT n.scope, t.due + n.due, t.number + 1 FROM turns AS t
    CROSS JOIN LATERAL (
        SELECT i.scope, (i.run_at <= now())::integer AS due FROM idempotency_outbox AS i
        WHERE i.state = 'ready' AND i.scope > t.scope
        ORDER BY i.scope, i.run_at
        LIMIT 1
    ) AS n
    WHERE t.due < %(shared)s AND t.number < {visited}
),

fair AS (
    SELECT j.id FROM turns AS t
    CROSS JOIN LATERAL (
        SELECT i.id FROM idempotency_outbox AS i
        WHERE
            i.state = 'ready' AND i.task = ANY(%(tasks)s)
            AND i.scope >= t.scope AND i.scope <= t.scope AND i.run_at <= now()
        ORDER BY i.scope, i.run_at
        LIMIT %(shared)s / greatest(1, (SELECT max(s.due) FROM turns AS s))
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS j
    LIMIT least(%(shared)s, %(limit)s - (SELECT count(*) FROM lapsed))
),

due AS (
    SELECT i.id FROM idempotency_outbox AS i
    WHERE
        i.state = 'ready' AND i.run_at <= now() AND i.task = ANY(%(tasks)s)
        AND i.id <> ALL (ARRAY(SELECT f.id FROM fair AS f))
    ORDER BY i.run_at
    LIMIT %(limit)s - (SELECT count(*) FROM lapsed) - (SELECT count(*) FROM fair)
    FOR NO KEY UPDATE SKIP LOCKED
),

taken AS (
    SELECT l.id, true AS lapsed FROM lapsed AS l
    UNION ALL
    SELECT f.id, false AS lapsed FROM fair AS f
    UNION ALL
    SELECT d.id, false AS lapsed FROM due AS d
),

claimed AS (
    UPDATE idempotency_outbox AS j SET
        state = 'running',
        owner = %(owner)s,
        attempt = j.attempt + 1,
        lease_until = now() + %(lease_seconds)s * interval '1 second',
        last_error = CASE WHEN t.lapsed THEN {lease_ran_out} ELSE j.last_error END,
        history = CASE WHEN t.lapsed THEN {lapsed_history} ELSE j.history END
    FROM taken AS t
    WHERE j.id = t.id
    RETURNING {columns}
)

-- name: outbox_time_out
-- Pending keys past their expiry fail for good, and the jobs that would have settled them are cancelled, in one commit.
-- If the job was tried, it may have happened, and the key becomes unknown instead. The job shows that when it is
-- cancelled: an operator's retry sets attempts to 0, but keeps the history.
-- A key whose job a worker runs under a live lease is skipped. So is a key whose job a worker claims at this moment.
-- A job is locked before its key, as in outbox_ended.
WITH late AS (
    SELECT k.scope, k.key, k.owner FROM idempotency_keys AS k
    WHERE
        k.state = 'pending' AND k.expires_at <= now()
        AND NOT EXISTS (
            SELECT FROM idempotency_outbox AS i
            WHERE
                i.scope = k.scope AND i.key = k.key AND i.key_owner = k.owner AND i.settles
                AND i.state = 'running' AND i.lease_until > now()
        )
    ORDER BY k.expires_at
    LIMIT %(limit)s
),

held AS (
    SELECT j.id
    FROM late AS l
    CROSS JOIN LATERAL (
        SELECT i.id FROM idempotency_outbox AS i
        WHERE
            i.scope = l.scope AND i.key = l.key AND i.key_owner = l.owner AND i.settles
            AND (i.state = 'ready' OR (i.state = 'running' AND i.lease_until <= now()))
        OFFSET 0
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS j
),

cancelled AS (
    UPDATE idempotency_outbox AS j SET
        state = 'cancelled', lease_until = NULL, last_error = {error}, finished_at = now()
    FROM held AS h
    WHERE j.id = h.id AND (j.state = 'ready' OR (j.state = 'running' AND j.lease_until <= now()))
    RETURNING j.scope, j.key, j.key_owner, j.attempt > 0 OR j.history <> '[]' AS tried
),

free AS (
    SELECT c.scope, c.key, c.key_owner, c.tried FROM cancelled AS c
    UNION ALL
    SELECT
        l.scope, l.key, l.owner,
        EXISTS (
            SELECT FROM idempotency_outbox AS i
            WHERE
                i.scope = l.scope AND i.key = l.key AND i.key_owner = l.owner AND i.settles
                AND (i.attempt > 0 OR i.history <> '[]')
        )
    FROM late AS l
    WHERE NOT EXISTS (
        SELECT FROM idempotency_outbox AS i
        WHERE
            i.scope = l.scope AND i.key = l.key AND i.key_owner = l.owner AND i.settles
            AND i.state IN ('ready', 'running')
    )
)

UPDATE idempotency_keys AS k SET
    state = CASE WHEN f.tried THEN 'unknown' ELSE 'failed' END,
    response_status = CASE WHEN NOT f.tried THEN %(status)s::integer END,
    response_headers = CASE WHEN NOT f.tried THEN %(headers)s::text END,
    response_body = CASE WHEN NOT f.tried THEN %(body)s::bytea END,
    response_schema_version = CASE WHEN NOT f.tried THEN %(schema_version)s::integer END,
    last_error = CASE WHEN f.tried THEN {doubt} END,
    reconcile_at = CASE WHEN f.tried THEN now() END,
    lease_until = CASE WHEN f.tried THEN now() ELSE k.lease_until END,
    finished_at = CASE WHEN NOT f.tried THEN now() END,
    expires_at = CASE
        WHEN f.tried THEN k.expires_at
        ELSE greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
    END
FROM free AS f
WHERE
    k.scope = f.scope AND k.key = f.key AND k.state = 'pending' AND k.owner = f.key_owner AND k.expires_at <= now()
RETURNING k.scope, k.key

-- name: outbox_turn
-- A worker's turn in one commit: end attempts (outbox_ended), and take the next jobs (outbox_taken). The ended jobs have
-- no state here. A job that a conclusion makes ready is not taken in the same statement: it does not see it yet.
WITH RECURSIVE {ended},

{taken}

SELECT c.*, ({next_turn}) FROM claimed AS c
UNION ALL
SELECT
    e.id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, e.owner, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL
FROM ended AS e
