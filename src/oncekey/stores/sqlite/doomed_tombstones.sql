-- Kept for the audit after expiry, for as long again as the key was; now it goes. Oldest first.
SELECT rowid, scope, key FROM idempotency_keys
WHERE state = 'expired' AND expires_at + retention_seconds <= ?1
ORDER BY expires_at + retention_seconds, scope, key LIMIT ?2
