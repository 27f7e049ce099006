-- Changes by an operator or the reconciler.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: audit
-- The changes of one key by an operator or the reconciler, newest first.
SELECT date_part('epoch', a.at), a.who, a.event, a.scope, a.key, a.job_id, a.before, a.after, a.why
FROM idempotency_audit AS a
WHERE a.scope = %(scope)s AND a.key = %(key)s
ORDER BY a.id DESC
LIMIT %(limit)s

-- name: audit_purge
-- Delete the oldest lines of the audit, up to a limit. The lines of a key that is not over stay.
WITH doomed AS (
    SELECT a.id FROM idempotency_audit AS a
    WHERE
        a.at <= now() - %(keep_seconds)s * interval '1 second'
        AND NOT EXISTS (
            SELECT 1 FROM idempotency_keys AS k
            WHERE
                k.scope = a.scope AND k.key = a.key
                AND k.state IN ('in_progress', 'pending', 'unknown', 'failed_retryable')
            OFFSET 0
        )
    ORDER BY a.at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)

DELETE FROM idempotency_audit AS l
WHERE l.id = ANY(ARRAY(SELECT d.id FROM doomed AS d))

-- name: noted
-- One line of the audit for each moved row whose swap has one.
noted AS (
    INSERT INTO idempotency_audit (who, event, scope, key, before, after, why)
    SELECT m.who, m.event, m.scope, m.key, m.before, m.after, m.why
    FROM moved AS m
    WHERE m.who IS NOT NULL
)
