SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'in_progress' AND k.lease_until <= now()
ORDER BY k.lease_until
LIMIT %(limit)s
