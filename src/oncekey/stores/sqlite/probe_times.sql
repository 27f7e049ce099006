-- How long the newest first attempts took, and for how long they were leased. Not those that a job or somebody else
-- settled: their time is not a handler's. ?1 at most so many
SELECT k.operation, k.finished_at - k.created_at, k.lease_until - k.created_at
FROM (
    SELECT scope, key, operation, attempt, created_at, finished_at, lease_until
    FROM idempotency_keys INDEXED BY idempotency_keys_expired
    WHERE state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL)
    ORDER BY expires_at DESC LIMIT ?1
) AS k
WHERE k.attempt = 1 AND k.finished_at IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM idempotency_outbox AS j WHERE j.scope = k.scope AND j.key = k.key AND j.settles)
  AND NOT EXISTS (SELECT 1 FROM idempotency_audit AS a WHERE a.scope = k.scope AND a.key = k.key)
