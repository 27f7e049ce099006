-- A worker takes a job. ?1 id · ?2 owner · ?3 end of the lease · ?4 last error · ?5 history
UPDATE idempotency_outbox SET
    state = 'running', owner = ?2, attempt = attempt + 1, lease_until = ?3, last_error = ?4, history = ?5
WHERE id = ?1
