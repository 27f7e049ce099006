-- An operator retries or discards a dead letter. ?1 id · ?2 state · ?3 now
UPDATE idempotency_outbox SET
    state = ?2,
    attempt = CASE WHEN ?2 = 'ready' THEN 0 ELSE attempt END,
    owner = NULL,
    run_at = CASE WHEN ?2 = 'ready' THEN ?3 ELSE run_at END,
    finished_at = CASE WHEN ?2 = 'ready' THEN NULL ELSE ?3 END
WHERE id = ?1 AND state = 'dead'
