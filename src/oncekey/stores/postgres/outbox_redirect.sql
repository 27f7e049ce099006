-- An operator retries or discards a dead letter. A retried job starts at attempt 0. If this dead letter made its key
-- unknown, the key becomes pending again, with a full retention for the retried job.
WITH held AS (
    SELECT i.id FROM idempotency_outbox AS i WHERE i.id = %(id)s AND i.state = 'dead' FOR NO KEY UPDATE
),

moved AS (
    UPDATE idempotency_outbox AS j SET
        state = %(to_state)s::text,
        attempt = CASE WHEN %(to_state)s::text = 'ready' THEN 0 ELSE j.attempt END,
        owner = NULL,
        run_at = CASE WHEN %(to_state)s::text = 'ready' THEN now() ELSE j.run_at END,
        finished_at = CASE WHEN %(to_state)s::text = 'ready' THEN NULL ELSE now() END
    FROM held AS h
    WHERE j.id = h.id AND j.state = 'dead'
    RETURNING j.*
),

reopened AS (
    UPDATE idempotency_keys AS k SET
        state = 'pending',
        last_error = NULL,
        reconcile_at = NULL,
        reconcile_tries = 0,
        expires_at = greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
    FROM moved AS m
    WHERE
        m.settles AND m.state = 'ready'
        AND k.scope = m.scope AND k.key = m.key AND k.state = 'unknown' AND k.owner = m.key_owner
),

noted AS (
    INSERT INTO idempotency_audit (who, event, scope, key, job_id, before, after, why)
    SELECT %(who)s::text, %(event)s::text, m.scope, m.key, m.id, 'dead', m.state, %(why)s::text FROM moved AS m
)

SELECT {columns} FROM moved AS j
