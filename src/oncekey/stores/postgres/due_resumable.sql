SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'failed_retryable' AND k.reconcile_at IS NOT NULL AND k.reconcile_at <= now()
ORDER BY k.reconcile_at
LIMIT %(limit)s
