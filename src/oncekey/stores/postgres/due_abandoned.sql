SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'pending' AND k.expires_at <= now()
ORDER BY k.expires_at
LIMIT %(limit)s
