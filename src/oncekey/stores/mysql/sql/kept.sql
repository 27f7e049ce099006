-- The values that encryption covers, as they are stored (stores/sql/kept.py), and how they are written again.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py); see keys.sql.
-- Old values are compared by their SHA-256, so that a packet holds a large value once.

-- name: kept_keys
-- A page, in the order of the primary key. The condition is written as ranges: MySQL reads a comparison of pairs from the
-- first row on.
SELECT
    k.scope, k.`key`, k.response_status, k.response_headers, k.response_body, k.response_schema_version, k.last_error,
    k.state, k.fingerprint_version, timestampdiff(MICROSECOND, '1970-01-01', k.expires_at) / 1e6
FROM idempotency_keys AS k FORCE INDEX (PRIMARY)
WHERE (k.scope = :after_a AND k.`key` > :after_b) OR k.scope > :after_a
ORDER BY k.scope, k.`key`
LIMIT :limit

-- name: kept_steps
SELECT s.scope, s.`key`, s.name, s.result
FROM idempotency_steps AS s FORCE INDEX (PRIMARY)
WHERE
    (s.scope = :after_a AND s.`key` = :after_b AND s.name > :after_c)
    OR (s.scope = :after_a AND s.`key` > :after_b)
    OR s.scope > :after_a
ORDER BY s.scope, s.`key`, s.name
LIMIT :limit

-- name: kept_audit
SELECT a.id, a.scope, a.`key`, a.event, a.why
FROM idempotency_audit AS a FORCE INDEX (PRIMARY)
WHERE a.id > :after_a
ORDER BY a.id
LIMIT :limit

-- name: kept_jobs
SELECT j.id, j.scope, j.`key`, j.payload, j.last_error, j.history
FROM idempotency_outbox AS j FORCE INDEX (idempotency_outbox_id)
WHERE j.id > :after_a
ORDER BY j.id
LIMIT :limit

-- name: rewritten
-- The numbers of the rows that were held, and so written.
SELECT CAST(coalesce(@oncekey_held, '') AS CHAR), @oncekey_count

-- name: rewrite_keys
-- Write new values over the old ones, where they still are. SKIP LOCKED: a row that an open transaction holds is left to a
-- later try.
{begin};
SELECT group_concat(w.n), count(*) INTO @oncekey_held, @oncekey_count
FROM ({compared}) AS w {at_keys}
WHERE {is_old_key}
FOR UPDATE SKIP LOCKED;
UPDATE ({wanted}) AS w {at_keys} SET
    k.response_headers = w.headers,
    k.response_body = w.body,
    k.response_schema_version = w.version,
    k.last_error = w.error
WHERE {is_held} AND {is_old_key};
{rewritten};
{whole};
COMMIT

-- name: is_old_key
-- Whether the values of a row are as the batch compares them.
k.response_status <=> w.old_status AND sha2(k.response_headers, 256) <=> w.old_headers
AND sha2(k.response_body, 256) <=> w.old_body AND k.response_schema_version <=> w.old_version
AND sha2(k.last_error, 256) <=> w.old_error

-- name: rewrite_steps
{begin};
SELECT group_concat(w.n), count(*) INTO @oncekey_held, @oncekey_count
FROM ({compared}) AS w {at_steps}
WHERE sha2(s.result, 256) <=> w.old_result
FOR UPDATE SKIP LOCKED;
UPDATE ({wanted}) AS w {at_steps} SET s.result = w.result
WHERE {is_held} AND sha2(s.result, 256) <=> w.old_result;
{rewritten};
{whole};
COMMIT

-- name: at_steps
STRAIGHT_JOIN idempotency_steps AS s FORCE INDEX (PRIMARY)
ON s.scope = w.scope AND s.`key` = w.`key` AND s.name = w.name

-- name: rewrite_audit
{begin};
SELECT group_concat(w.n), count(*) INTO @oncekey_held, @oncekey_count
FROM ({compared}) AS w STRAIGHT_JOIN idempotency_audit AS a FORCE INDEX (PRIMARY) ON a.id = w.id
WHERE sha2(a.why, 256) <=> w.old_why
FOR UPDATE SKIP LOCKED;
UPDATE ({wanted}) AS w STRAIGHT_JOIN idempotency_audit AS a FORCE INDEX (PRIMARY) ON a.id = w.id SET a.why = w.why
WHERE {is_held} AND sha2(a.why, 256) <=> w.old_why;
{rewritten};
{whole};
COMMIT

-- name: rewrite_jobs
{begin};
SELECT group_concat(w.n), count(*) INTO @oncekey_held, @oncekey_count
FROM ({compared}) AS w {at_jobs}
WHERE {is_old_job}
FOR UPDATE SKIP LOCKED;
UPDATE ({wanted}) AS w {at_jobs} SET j.payload = w.payload, j.last_error = w.error, j.history = w.history
WHERE {is_held} AND {is_old_job};
{rewritten};
{whole};
COMMIT

-- name: is_old_job
sha2(j.payload, 256) <=> w.old_payload AND sha2(j.last_error, 256) <=> w.old_error AND sha2(j.history, 256) <=> w.old_history

-- name: note_walk
-- One line of the audit that belongs to no key.
INSERT INTO idempotency_audit (at, who, event, scope, `key`, `before`, `after`, why)
VALUES (utc_timestamp(6), :who, :event, :scope, :key, :before, :after, :why)
