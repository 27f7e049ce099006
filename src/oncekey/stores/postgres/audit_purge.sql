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
