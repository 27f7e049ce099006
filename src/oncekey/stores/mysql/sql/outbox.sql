-- Jobs.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py); see keys.sql. As there, every statement
-- that writes compares its row once more: in a Galera cluster its transaction may be over.

-- name: outbox_columns
-- The columns of a Job, in the order in which outbox.py reads them; `j` is the row.
j.id, j.scope, j.`key`, j.key_owner, j.operation, j.task, j.payload, j.downstream_key, j.settles, j.state, j.attempt,
j.owner, timestampdiff(MICROSECOND, '1970-01-01', j.lease_until), timestampdiff(MICROSECOND, '1970-01-01', j.run_at),
j.provider_id, j.last_error, j.history, timestampdiff(MICROSECOND, '1970-01-01', j.created_at),
timestampdiff(MICROSECOND, '1970-01-01', j.finished_at), timestampdiff(MICROSECOND, '1970-01-01', {now})

-- name: taken
-- The jobs that are held, each found by its primary key.
json_table(@oncekey_held, '$[*]' COLUMNS (n BIGINT PATH '$')) AS h
STRAIGHT_JOIN idempotency_outbox AS j FORCE INDEX (PRIMARY) ON j.number = h.n

-- name: at_jobs
-- The jobs of a batch `w`, each found by its id.
STRAIGHT_JOIN idempotency_outbox AS j FORCE INDEX (idempotency_outbox_id) ON j.id = w.id

-- name: jobs_of_keys
-- The jobs that are to settle the keys of a batch `w`.
STRAIGHT_JOIN idempotency_outbox AS j FORCE INDEX (idempotency_outbox_key)
ON j.scope = w.scope AND j.`key` = w.`key` AND j.key_owner = w.owner AND j.settles

-- name: outbox_claim
{begin};
{claim_rows};
{whole};
COMMIT

-- name: outbox_turn
-- A worker ends its jobs, and claims the next: `outbox_conclude` and `outbox_claim` in one commit.
{begin};
{conclude_rows};
{claim_rows};
{whole};
COMMIT

-- name: claim_rows
-- Take jobs whose worker's lease is over, and then jobs that are due, a part of them in turns by scope. It reads rows,
-- without a watermark, so it also finds a job that commits late (hazard 10). SKIP LOCKED: two workers that claim at once
-- take different rows. The history is set before the attempt: MySQL computes one column after the other.
SELECT utc_timestamp(6) INTO @oncekey_now;
SELECT coalesce(json_arrayagg(t.number), '[]') INTO @oncekey_held FROM (
    SELECT i.number FROM idempotency_outbox AS i FORCE INDEX (idempotency_outbox_due)
    WHERE i.state = 'running' AND i.due_at <= {now} AND i.task IN {tasks} AND {not_ended}
    ORDER BY i.due_at
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
) AS t;
{turns}
SELECT json_merge_preserve(@oncekey_held, coalesce(json_arrayagg(t.number), '[]')) INTO @oncekey_held FROM (
    SELECT i.number FROM idempotency_outbox AS i FORCE INDEX (idempotency_outbox_due)
    WHERE i.state = 'ready' AND i.due_at <= {now} AND i.task IN {tasks} AND {not_ended}
    ORDER BY i.due_at
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
) AS t;
SELECT coalesce(json_arrayagg(t.n), '[]') INTO @oncekey_held FROM (
    SELECT h.n FROM json_table(@oncekey_held, '$[*]' COLUMNS (place FOR ORDINALITY, n BIGINT PATH '$')) AS h
    GROUP BY h.n
    ORDER BY min(h.place)
    LIMIT :limit
) AS t;
UPDATE {taken} SET
    j.history = CASE WHEN j.state = 'running' THEN {lapsed_history} ELSE j.history END,
    j.last_error = CASE WHEN j.state = 'running' THEN :lapsed ELSE j.last_error END,
    j.owner = :owner,
    j.attempt = j.attempt + 1,
    j.lease_until = {now} + INTERVAL :lease MICROSECOND,
    j.state = 'running'
WHERE j.state IN ('ready', 'running') AND j.due_at <= {now};
SELECT {columns} FROM {taken}

-- name: claim_turn
-- The turn of one scope.
SELECT json_merge_preserve(@oncekey_held, coalesce(json_arrayagg(t.number), '[]')) INTO @oncekey_held FROM (
    SELECT i.number FROM idempotency_outbox AS i FORCE INDEX (idempotency_outbox_turns)
    WHERE i.state = 'ready' AND i.scope = :scope AND i.due_at <= {now} AND i.task IN {tasks} AND {not_ended}
    ORDER BY i.due_at
    LIMIT :most
    FOR UPDATE SKIP LOCKED
) AS t;

-- name: outbox_scopes
-- The next scopes that have ready jobs, and whether the first job of each is due.
SELECT i.scope, min(i.due_at) <= utc_timestamp(6)
FROM idempotency_outbox AS i FORCE INDEX (idempotency_outbox_turns)
WHERE i.state = 'ready' AND i.scope > :after
GROUP BY i.scope
ORDER BY i.scope
LIMIT :limit

-- name: outbox_history
-- The history with one more failed attempt. `j` is the row as it was, {error} the error. The oldest are dropped first.
json_array_append(
    CASE WHEN json_length(j.history) >= {kept} THEN json_remove(j.history, '$[0]') ELSE j.history END,
    '$',
    json_object(
        'attempt', j.attempt, 'at', timestampdiff(MICROSECOND, '1970-01-01', {now}) / 1000000e0,
        'error', CONVERT({error} USING utf8mb4)
    )
)

-- name: outbox_conclude
-- End attempts: each job that still is running under its owner token, and the key that it settles, if the key still is
-- pending under the token of the attempt that enqueued the job. If a job is not returned, its worker had lost it.
-- Jobs are locked first, in the order of their ids, and keys after them; `outbox_time_out` does the same.
-- The owner stays in the row: a worker that did not get the answer sees by it that its own write succeeded.
{begin};
{conclude_rows};
{whole};
COMMIT

-- name: conclude_rows
SELECT group_concat(w.n), count(*), utc_timestamp(6) INTO @oncekey_held, @oncekey_count, @oncekey_now
FROM ({compared}) AS w {at_jobs}
WHERE j.state = 'running' AND j.owner = w.owner
FOR UPDATE;
UPDATE ({wanted}) AS w {at_jobs} SET
    j.history = CASE WHEN w.error IS NULL THEN j.history ELSE {history} END,
    j.attempt = CASE WHEN w.ending = 'release' THEN j.attempt - 1 ELSE j.attempt END,
    j.state = CASE WHEN w.ending IN ('done', 'dead') THEN w.ending ELSE 'ready' END,
    j.lease_until = NULL,
    j.run_at = CASE WHEN w.ending = 'retry' THEN {now} + INTERVAL w.retry_in MICROSECOND ELSE j.run_at END,
    j.last_error = CASE WHEN w.ending = 'release' THEN j.last_error ELSE w.error END,
    j.finished_at = CASE WHEN w.ending IN ('done', 'dead') THEN {now} END
WHERE {is_held} AND j.state = 'running' AND j.owner = w.owner;
{settle}
SELECT w.n FROM ({compared}) AS w WHERE {is_held}

-- name: outbox_settle
UPDATE ({wanted}) AS w {at_jobs}
STRAIGHT_JOIN idempotency_keys AS k FORCE INDEX (PRIMARY) ON k.scope = j.scope AND k.`key` = j.`key`
SET
    k.state = w.settle,
    k.response_status = w.status,
    k.response_headers = w.headers,
    k.response_body = w.body,
    k.response_schema_version = w.schema_version,
    k.last_error = CASE WHEN w.settle = 'unknown' THEN w.error END,
    k.reconcile_at = CASE WHEN w.settle = 'unknown' THEN {now} END,
    k.lease_until = CASE WHEN w.settle = 'unknown' THEN {now} ELSE k.lease_until END,
    k.finished_at = CASE WHEN w.settle IN ('completed', 'failed') THEN {now} END,
    k.expires_at = CASE
        WHEN w.settle IN ('completed', 'failed') THEN greatest(k.expires_at, {now} + INTERVAL {retention} MICROSECOND)
        ELSE k.expires_at
    END
WHERE
    {is_held} AND w.settle IS NOT NULL AND j.settles AND k.state = 'pending' AND k.owner = j.key_owner
    AND j.state = w.ending AND j.owner = w.owner;

-- name: outbox_deferred_to
-- The job that the request of an owner token was deferred to.
SELECT {columns} FROM idempotency_outbox AS j
WHERE j.scope = :scope AND j.`key` = :key AND j.key_owner = :owner AND j.settles
LIMIT 1

-- name: outbox_enqueue
-- One job, in the transaction of the request that adds it: the job exists if and only if that transaction commits.
-- It runs on connections of any driver and any character set: placeholders are :name, and CONVERT gives the bytes.
INSERT INTO idempotency_outbox (
    id, scope, `key`, key_owner, operation, task, payload, downstream_key, settles, run_at, history, created_at
) VALUES (
    CONVERT(:id USING utf8mb4), CONVERT(:scope USING utf8mb4), CONVERT(:key USING utf8mb4),
    CONVERT(:key_owner USING utf8mb4), CONVERT(:operation USING utf8mb4), CONVERT(:task USING utf8mb4),
    CONVERT(:payload USING utf8mb4), CONVERT(:downstream_key USING utf8mb4), :settles,
    coalesce('1970-01-01' + INTERVAL CAST(round(:run_at * 1000000) AS SIGNED) MICROSECOND, utc_timestamp(6)),
    '[]', utc_timestamp(6)
)

-- name: outbox_health
-- Times are microseconds.
SELECT
    (
        SELECT count(*) FROM (
            SELECT 1 FROM idempotency_outbox FORCE INDEX (idempotency_outbox_due)
            WHERE state = 'ready' AND due_at <= utc_timestamp(6) LIMIT {counted}
        ) AS r
    ),
    coalesce(timestampdiff(MICROSECOND, (
        SELECT run_at FROM idempotency_outbox FORCE INDEX (idempotency_outbox_due)
        WHERE state = 'ready' AND due_at <= utc_timestamp(6)
        ORDER BY due_at
        LIMIT 1
    ), utc_timestamp(6)), 0),
    (
        SELECT count(*) FROM (
            SELECT 1 FROM idempotency_outbox FORCE INDEX (idempotency_outbox_due) WHERE state = 'dead' LIMIT {counted}
        ) AS d
    )

-- name: outbox_job
SELECT {columns} FROM idempotency_outbox AS j WHERE j.id = :id

-- name: outbox_jobs
-- Jobs in one state, oldest first.
SELECT {columns} FROM idempotency_outbox AS j FORCE INDEX (idempotency_outbox_due)
WHERE j.state = {state}
ORDER BY j.due_at
LIMIT :limit

-- name: outbox_jobs_of
-- The jobs of one key, oldest first.
SELECT {columns} FROM idempotency_outbox AS j FORCE INDEX (idempotency_outbox_key)
WHERE j.scope = :scope AND j.`key` = :key
ORDER BY j.created_at, j.id
LIMIT :limit

-- name: outbox_late
-- Pending keys past their expiry, unless a worker runs the job under a live lease. `outbox_time_out` looks again.
SELECT k.scope, k.`key`, k.owner FROM idempotency_keys AS k FORCE INDEX (idempotency_keys_due)
WHERE
    k.duty = 'pending' AND k.due_at <= utc_timestamp(6)
    AND NOT EXISTS (
        SELECT 1 FROM idempotency_outbox AS i
        WHERE
            i.scope = k.scope AND i.`key` = k.`key` AND i.key_owner = k.owner AND i.settles
            AND i.state = 'running' AND i.lease_until > utc_timestamp(6)
    )
ORDER BY k.due_at
LIMIT :limit

-- name: outbox_provider
UPDATE idempotency_outbox SET provider_id = :provider_id
WHERE id = :id AND state = 'running' AND owner = :owner

-- name: outbox_purge
-- Delete jobs that are done or cancelled for long enough. Dead letters stay until an operator redirects them. The job
-- that an unknown key was deferred to stays as well: it is the proof that the request itself is done.
{begin};
SELECT coalesce(json_arrayagg(t.number), '[]') INTO @oncekey_held FROM (
    SELECT i.number FROM idempotency_outbox AS i FORCE INDEX (idempotency_outbox_due)
    WHERE
        i.state = {state} AND i.due_at <= utc_timestamp(6) - INTERVAL :keep MICROSECOND
        AND NOT (i.settles AND EXISTS (
            SELECT 1 FROM idempotency_keys AS k
            WHERE k.scope = i.scope AND k.`key` = i.`key` AND k.state = 'unknown' AND k.owner = i.key_owner
        ))
    ORDER BY i.due_at
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
) AS t;
DELETE j FROM {taken} WHERE j.state = {state};
{whole};
COMMIT

-- name: outbox_redirect
-- An operator retries or discards a dead letter. A retried job starts at attempt 0. If this dead letter made its key
-- unknown, the key becomes pending again, with a full retention for the retried job.
{begin};
SELECT coalesce(json_arrayagg(j.number), '[]'), utc_timestamp(6) INTO @oncekey_held, @oncekey_now
FROM idempotency_outbox AS j WHERE j.id = :id AND j.state = 'dead' FOR UPDATE;
UPDATE {taken} SET
    j.state = {to_state},
    j.attempt = CASE WHEN {to_state} = 'ready' THEN 0 ELSE j.attempt END,
    j.owner = NULL,
    j.run_at = CASE WHEN {to_state} = 'ready' THEN {now} ELSE j.run_at END,
    j.finished_at = CASE WHEN {to_state} = 'ready' THEN NULL ELSE {now} END
WHERE j.state = 'dead';
UPDATE {taken}
STRAIGHT_JOIN idempotency_keys AS k FORCE INDEX (PRIMARY) ON k.scope = j.scope AND k.`key` = j.`key`
SET
    k.state = 'pending',
    k.last_error = NULL,
    k.reconcile_at = NULL,
    k.reconcile_tries = 0,
    k.expires_at = greatest(k.expires_at, {now} + INTERVAL {retention} MICROSECOND)
WHERE j.settles AND j.state = 'ready' AND k.state = 'unknown' AND k.owner = j.key_owner;
INSERT INTO idempotency_audit (at, who, event, scope, `key`, job_id, `before`, `after`, why)
SELECT {now}, :who, :event, j.scope, j.`key`, j.id, 'dead', j.state, :why FROM {taken}
WHERE j.state = {to_state} AND coalesce(j.finished_at, j.run_at) = {now};
SELECT {columns} FROM {taken};
{whole};
COMMIT

-- name: outbox_renew
-- Extend the leases of jobs that this owner still holds. It waits for a locked row, which is never locked for long: a
-- skipped row would look like a lost job. Rows are locked in the order of ids, so that two batches cannot deadlock.
{begin};
UPDATE ({wanted}) AS w {at_jobs} SET j.lease_until = utc_timestamp(6) + INTERVAL :lease MICROSECOND
WHERE j.state = 'running' AND j.owner = :owner;
SELECT j.id FROM ({wanted}) AS w {at_jobs} WHERE j.state = 'running' AND j.owner = :owner;
{whole};
COMMIT

-- name: outbox_time_out
-- Pending keys past their expiry fail for good, and the jobs that would have settled them are cancelled, in one commit.
-- If the job was tried, it may have happened, and the key becomes unknown instead: an operator's retry sets attempts to
-- 0, but keeps the history. A key whose job a worker runs under a live lease is skipped. So is a key whose job a worker
-- claims at this moment. A job is locked before its key, as in `outbox_conclude`.
{begin};
SELECT coalesce(json_arrayagg(j.number), '[]'), utc_timestamp(6) INTO @oncekey_jobs, @oncekey_now
FROM ({placed}) AS w {jobs_of_keys}
WHERE j.state = 'ready' OR (j.state = 'running' AND j.lease_until <= utc_timestamp(6))
FOR UPDATE SKIP LOCKED;
SELECT group_concat(w.n), count(*) INTO @oncekey_held, @oncekey_count
FROM ({placed}) AS w {at_keys}
WHERE
    k.state = 'pending' AND k.owner = w.owner AND k.expires_at <= {now}
    AND NOT EXISTS (
        SELECT 1 FROM idempotency_outbox AS i
        WHERE
            i.scope = w.scope AND i.`key` = w.`key` AND i.key_owner = w.owner AND i.settles
            AND i.state IN ('ready', 'running') AND NOT json_contains(@oncekey_jobs, CAST(i.number AS CHAR))
    )
FOR UPDATE SKIP LOCKED;
SELECT json_arrayagg(w.n) INTO @oncekey_tried
FROM ({placed}) AS w {jobs_of_keys}
WHERE j.attempt > 0 OR j.history <> '[]';
UPDATE ({placed}) AS w {jobs_of_keys}
SET j.state = 'cancelled', j.lease_until = NULL, j.last_error = :error, j.finished_at = {now}
WHERE {is_held} AND (j.state = 'ready' OR (j.state = 'running' AND j.lease_until <= {now}));
UPDATE ({placed}) AS w {at_keys} SET
    k.state = CASE WHEN {was_tried} THEN 'unknown' ELSE 'failed' END,
    k.response_status = CASE WHEN {was_tried} THEN NULL ELSE :status END,
    k.response_headers = CASE WHEN {was_tried} THEN NULL ELSE :headers END,
    k.response_body = CASE WHEN {was_tried} THEN NULL ELSE :body END,
    k.response_schema_version = CASE WHEN {was_tried} THEN NULL ELSE :schema_version END,
    k.last_error = CASE WHEN {was_tried} THEN :doubt END,
    k.reconcile_at = CASE WHEN {was_tried} THEN {now} END,
    k.lease_until = CASE WHEN {was_tried} THEN {now} ELSE k.lease_until END,
    k.finished_at = CASE WHEN {was_tried} THEN NULL ELSE {now} END,
    k.expires_at = CASE
        WHEN {was_tried} THEN k.expires_at
        ELSE greatest(k.expires_at, {now} + INTERVAL {retention} MICROSECOND)
    END
WHERE
    {is_held} AND k.state = 'pending' AND k.owner = w.owner AND k.expires_at <= {now}
    AND NOT EXISTS (
        SELECT 1 FROM idempotency_outbox AS i
        WHERE
            i.scope = w.scope AND i.`key` = w.`key` AND i.key_owner = w.owner AND i.settles
            AND i.state IN ('ready', 'running')
    );
SELECT w.scope, w.`key` FROM ({placed}) AS w WHERE {is_held};
{whole};
COMMIT

-- name: was_tried
coalesce(json_contains(@oncekey_tried, CAST(w.n AS CHAR)), 0)
