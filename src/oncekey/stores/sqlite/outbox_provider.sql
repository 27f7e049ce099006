UPDATE idempotency_outbox SET provider_id = ?3 WHERE id = ?1 AND state = 'running' AND owner = ?2
