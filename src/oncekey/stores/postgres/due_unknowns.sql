SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'unknown' AND k.reconcile_at <= now()
ORDER BY k.reconcile_at
LIMIT %(limit)s
