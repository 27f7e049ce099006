UPDATE idempotency_outbox SET lease_until = ?3 WHERE id = ?1 AND state = 'running' AND owner = ?2
