SELECT {columns} FROM idempotency_keys AS k
WHERE
    (k.state IN ('completed', 'failed') OR (k.state = 'failed_retryable' AND k.recovery_point IS NULL))
    AND k.expires_at <= now()
ORDER BY k.expires_at
LIMIT %(limit)s
