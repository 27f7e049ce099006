-- An operator takes a dead letter up again, or puts it away. Taken up again, the job begins anew, and so does a key that
-- only this dead letter made unknown: it is pending again, and kept long enough to see the end.
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
