-- Cancel the jobs that would have settled a key that is timed out. ?1-?3 key and owner · ?4 now · ?5 why
UPDATE idempotency_outbox SET state = 'cancelled', lease_until = NULL, last_error = ?5, finished_at = ?4
WHERE scope = ?1 AND key = ?2 AND key_owner = ?3 AND settles
  AND (state = 'ready' OR (state = 'running' AND lease_until <= ?4))
