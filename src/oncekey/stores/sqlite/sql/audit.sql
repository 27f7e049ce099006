-- Changes by an operator or the reconciler.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: audit
-- The changes of one key by an operator or the reconciler, newest first.
SELECT at, who, event, scope, key, job_id, before, after, why
FROM idempotency_audit
WHERE scope = ? AND key = ?
ORDER BY id DESC LIMIT ?

-- name: audit_purge
-- Delete the oldest lines of the audit, at most ?2 that are older than ?1. The lines of a key that is not over stay.
DELETE FROM idempotency_audit WHERE id IN (
    SELECT a.id FROM idempotency_audit AS a
    WHERE a.at <= ?1 AND NOT EXISTS (
        SELECT 1 FROM idempotency_keys AS k
        WHERE k.scope = a.scope AND k.key = a.key
          AND k.state IN ('in_progress', 'pending', 'unknown', 'failed_retryable')
    )
    ORDER BY a.at LIMIT ?2
)

-- name: note
-- One line of the audit.
INSERT INTO idempotency_audit (at, who, event, scope, key, job_id, before, after, why)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
