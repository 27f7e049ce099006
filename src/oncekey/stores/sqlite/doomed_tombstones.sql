-- The expired rows that the purge deletes, oldest first: they were kept for a second retention, for the audit.
SELECT rowid, scope, key FROM idempotency_keys
WHERE state = 'expired' AND expires_at + retention_seconds <= ?1
ORDER BY expires_at + retention_seconds, scope, key LIMIT ?2
