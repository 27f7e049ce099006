-- An attempt ended; the caller has seen, in this transaction, that the row is its own.
-- The owner stays: whoever did not hear our answer sees by it that it was they.
-- ?1 id · ?2 state · ?3 attempt · ?4 run_at · ?5 last error · ?6 history · ?7 finished_at
UPDATE idempotency_outbox SET
    state = ?2, attempt = ?3, lease_until = NULL, run_at = ?4, last_error = ?5, history = ?6, finished_at = ?7
WHERE id = ?1
