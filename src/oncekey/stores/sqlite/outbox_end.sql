-- An attempt ended. The caller has checked, in this transaction, that it owns the job.
-- The owner stays in the row: a worker that did not get the answer sees by it that its own write succeeded.
-- ?1 id · ?2 state · ?3 attempt · ?4 run_at · ?5 last error · ?6 history · ?7 finished_at
UPDATE idempotency_outbox SET
    state = ?2, attempt = ?3, lease_until = NULL, run_at = ?4, last_error = ?5, history = ?6, finished_at = ?7
WHERE id = ?1
