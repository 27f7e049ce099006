-- Jobs.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: outbox_cancel
-- Cancel the jobs that would have settled a key that is timed out. ?1-?3 key and owner · ?4 now · ?5 why
UPDATE idempotency_outbox SET state = 'cancelled', lease_until = NULL, last_error = ?5, finished_at = ?4
WHERE scope = ?1 AND key = ?2 AND key_owner = ?3 AND settles
  AND (state = 'ready' OR (state = 'running' AND lease_until <= ?4))

-- name: outbox_columns
-- The columns of a Job but its last, `now`, in the order in which stores/sql/outbox_rows.py reads them.
id, scope, key, key_owner, operation, task, payload, downstream_key, settles, state, attempt, owner, lease_until, run_at,
       provider_id, last_error, history, created_at, finished_at

-- name: outbox_deferred_to
-- The job that the request of an owner token was deferred to. ?1-?3 key and owner
SELECT {columns} FROM idempotency_outbox
WHERE scope = ?1 AND key = ?2 AND key_owner = ?3 AND settles
LIMIT 1

-- name: outbox_due
-- Jobs that are due. ?1 now · ?2 limit · the rest: the names of tasks
SELECT id FROM idempotency_outbox
WHERE state = 'ready' AND run_at <= ?1 AND task IN ({tasks})
ORDER BY run_at LIMIT ?2

-- name: outbox_due_of
-- Jobs of one scope that are due. ?1 now · ?2 limit · ?3 scope · the rest: the names of tasks
SELECT id FROM idempotency_outbox
WHERE state = 'ready' AND scope = ?3 AND run_at <= ?1 AND task IN ({tasks})
ORDER BY scope, run_at LIMIT ?2

-- name: outbox_end
-- An attempt ended. The caller has checked, in this transaction, that it owns the job.
-- The owner stays in the row: a worker that did not get the answer sees by it that its own write succeeded.
-- ?1 id · ?2 state · ?3 attempt · ?4 run_at · ?5 last error · ?6 history · ?7 finished_at
UPDATE idempotency_outbox SET
    state = ?2, attempt = ?3, lease_until = NULL, run_at = ?4, last_error = ?5, history = ?6, finished_at = ?7
WHERE id = ?1

-- name: outbox_enqueue
-- One job, in the transaction of the request that adds it: the job exists if and only if that transaction commits.
-- The clock of this host, in seconds since the epoch. (unixepoch('subsec') is not in the SQLite 3.34 of RHEL 9.)
INSERT INTO idempotency_outbox (
    id, scope, key, key_owner, operation, task, payload, downstream_key, settles, run_at, created_at
) VALUES (
    :id, :scope, :key, :key_owner, :operation, :task, :payload, :downstream_key, :settles,
    coalesce(:run_at, (julianday('now') - 2440587.5) * 86400.0), (julianday('now') - 2440587.5) * 86400.0
)

-- name: outbox_health
SELECT
    (SELECT count(*) FROM (SELECT 1 FROM idempotency_outbox WHERE state = 'ready' AND run_at <= ?1 LIMIT ?2)),
    (SELECT ?1 - run_at FROM idempotency_outbox WHERE state = 'ready' AND run_at <= ?1 ORDER BY run_at LIMIT 1),
    (SELECT count(*) FROM (SELECT 1 FROM idempotency_outbox WHERE state = 'dead' LIMIT ?2))

-- name: outbox_held
-- What an owner needs to end its running job. No row: the owner no longer holds the job.
SELECT attempt, history, last_error, run_at, scope, key, key_owner, settles FROM idempotency_outbox
WHERE id = ?1 AND state = 'running' AND owner = ?2

-- name: outbox_job
SELECT {columns} FROM idempotency_outbox WHERE id = ?1

-- name: outbox_jobs
-- Jobs in one state, oldest first. The state is part of the text, so that SQLite can use its partial index.
SELECT {columns} FROM idempotency_outbox
WHERE {state}
ORDER BY {since} LIMIT ?1

-- name: outbox_jobs_of
-- The jobs of one key, oldest first. ?1, ?2 scope and key · ?3 limit
SELECT {columns} FROM idempotency_outbox
WHERE scope = ?1 AND key = ?2
ORDER BY created_at, id LIMIT ?3

-- name: outbox_lapsed
-- Jobs whose worker's lease is over. ?1 now · ?2 limit · the rest: the names of tasks
SELECT id FROM idempotency_outbox
WHERE state = 'running' AND lease_until <= ?1 AND task IN ({tasks})
ORDER BY lease_until LIMIT ?2

-- name: outbox_late
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

-- name: outbox_next_scope
-- The next scope that has ready jobs, and when the first of them is due. ?1 only scopes after this one
SELECT scope, run_at FROM idempotency_outbox
WHERE state = 'ready' AND scope > ?1
ORDER BY scope, run_at LIMIT 1

-- name: outbox_provider
UPDATE idempotency_outbox SET provider_id = ?3 WHERE id = ?1 AND state = 'running' AND owner = ?2

-- name: outbox_purge
-- Delete jobs that are done or cancelled for long enough. Dead letters stay until an operator redirects them. The job
-- that an unknown key was deferred to stays as well: it is the proof that the request itself is done.
DELETE FROM idempotency_outbox WHERE id IN (
    SELECT i.id FROM idempotency_outbox AS i
    WHERE i.state IN ('done', 'cancelled') AND i.finished_at <= ?1
      AND NOT (i.settles AND EXISTS (
        SELECT 1 FROM idempotency_keys AS k
        WHERE k.scope = i.scope AND k.key = i.key AND k.state = 'unknown' AND k.owner = i.key_owner
      ))
    ORDER BY i.finished_at LIMIT ?2
)

-- name: outbox_redirect
-- An operator retries or discards a dead letter. ?1 id · ?2 state · ?3 now
UPDATE idempotency_outbox SET
    state = ?2,
    attempt = CASE WHEN ?2 = 'ready' THEN 0 ELSE attempt END,
    owner = NULL,
    run_at = CASE WHEN ?2 = 'ready' THEN ?3 ELSE run_at END,
    finished_at = CASE WHEN ?2 = 'ready' THEN NULL ELSE ?3 END
WHERE id = ?1 AND state = 'dead'

-- name: outbox_renew
UPDATE idempotency_outbox SET lease_until = ?3 WHERE id = ?1 AND state = 'running' AND owner = ?2

-- name: outbox_reopen
-- A key that a dead letter made unknown becomes pending again, with a full retention for the retried job.
-- ?1-?3 key and owner · ?4 now
UPDATE idempotency_keys SET
    state = 'pending',
    last_error = NULL,
    reconcile_at = NULL,
    reconcile_tries = 0,
    expires_at = max(expires_at, ?4 + retention_seconds)
WHERE scope = ?1 AND key = ?2 AND state = 'unknown' AND owner = ?3

-- name: outbox_settle
-- Settle or time out a key, in the transaction that ends its job, if the key still is pending under the token of the
-- attempt that enqueued the job. ?1-?3 key and owner · ?4 now · ?5 state · ?6 error · ?7-?10 the response
UPDATE idempotency_keys SET
    state = ?5,
    last_error = CASE WHEN ?5 = 'unknown' THEN ?6 END,
    reconcile_at = CASE WHEN ?5 = 'unknown' THEN ?4 END,
    lease_until = CASE WHEN ?5 = 'unknown' THEN ?4 ELSE lease_until END,
    finished_at = CASE WHEN ?5 IN ('completed', 'failed') THEN ?4 END,
    expires_at = CASE
        WHEN ?5 IN ('completed', 'failed') THEN max(expires_at, ?4 + retention_seconds) ELSE expires_at
    END,
    response_status = ?7,
    response_headers = ?8,
    response_schema_version = ?9,
    response_body = ?10
WHERE scope = ?1 AND key = ?2 AND state = 'pending' AND owner = ?3

-- name: outbox_take
-- A worker takes a job. ?1 id · ?2 owner · ?3 end of the lease · ?4 last error · ?5 history
UPDATE idempotency_outbox SET
    state = 'running', owner = ?2, attempt = attempt + 1, lease_until = ?3, last_error = ?4, history = ?5
WHERE id = ?1
