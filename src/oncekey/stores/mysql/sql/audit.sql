-- Changes by an operator or the reconciler.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: audit
-- The changes of one key by an operator or the reconciler, newest first.
SELECT
    timestampdiff(MICROSECOND, '1970-01-01', a.at), a.who, a.event, a.scope, a.`key`, a.job_id, a.`before`, a.`after`, a.why
FROM idempotency_audit AS a
WHERE a.scope = :scope AND a.`key` = :key
ORDER BY a.id DESC
LIMIT :limit

-- name: audit_purge
-- Delete the oldest lines of the audit, up to a limit. The lines of a key that is not over stay.
START TRANSACTION;
SELECT json_arrayagg(d.id) INTO @oncekey_held FROM (
    SELECT a.id FROM idempotency_audit AS a FORCE INDEX (idempotency_audit_at)
    WHERE
        a.at <= utc_timestamp(6) - INTERVAL :keep_seconds MICROSECOND
        AND NOT EXISTS (
            SELECT 1 FROM idempotency_keys AS k
            WHERE
                k.scope = a.scope AND k.`key` = a.`key`
                AND k.state IN ('in_progress', 'pending', 'unknown', 'failed_retryable')
        )
    ORDER BY a.at
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
) AS d;
DELETE a FROM json_table(@oncekey_held, '$[*]' COLUMNS (n BIGINT PATH '$')) AS h
STRAIGHT_JOIN idempotency_audit AS a ON a.id = h.n;
COMMIT

-- name: note
-- One line of the audit for each moved row whose swap has one.
INSERT INTO idempotency_audit (at, who, event, scope, `key`, `before`, `after`, why)
SELECT {now}, w.who, w.event, w.scope, w.`key`, w.from_state, w.to_state, w.why
FROM ({audits}) AS w
WHERE {is_held} AND {is_moved};
