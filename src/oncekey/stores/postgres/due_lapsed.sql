SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'failed_retryable' AND k.recovery_point IS NOT NULL AND k.expires_at <= now()
ORDER BY k.expires_at
LIMIT %(limit)s
