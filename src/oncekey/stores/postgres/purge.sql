-- Delete final rows past their expiry, at most so many, skipping what somebody holds right now.
WITH doomed AS (
    SELECT k.scope, k.key FROM idempotency_keys AS k
    WHERE
        (k.state IN ('completed', 'failed') OR (k.state = 'failed_retryable' AND k.recovery_point IS NULL))
        AND k.expires_at <= now()
    ORDER BY k.expires_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)

DELETE FROM idempotency_keys AS k
USING doomed AS d
WHERE k.scope = d.scope AND k.key = d.key
