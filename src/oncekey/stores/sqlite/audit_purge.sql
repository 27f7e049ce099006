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
