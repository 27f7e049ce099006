-- Pending keys past their expiry, unless a worker runs the job under a live lease; and whether the job was ever tried.
-- An operator's retry sets attempts to 0, but keeps the history. ?1 now · ?2 limit
SELECT
    k.scope, k.key, k.owner,
    EXISTS (
        SELECT 1 FROM idempotency_outbox AS i
        WHERE i.scope = k.scope AND i.key = k.key AND i.key_owner = k.owner AND i.settles
          AND (i.attempt > 0 OR i.history <> '[]')
    )
FROM idempotency_keys AS k
WHERE k.state = 'pending' AND k.expires_at <= ?1
  AND NOT EXISTS (
    SELECT 1 FROM idempotency_outbox AS i
    WHERE i.scope = k.scope AND i.key = k.key AND i.key_owner = k.owner AND i.settles
      AND i.state = 'running' AND i.lease_until > ?1
  )
ORDER BY k.expires_at LIMIT ?2
