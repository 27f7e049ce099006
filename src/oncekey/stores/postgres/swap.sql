-- Move each row that still is (from_state, owner); what is not returned was not moved.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(to_state)s, %(new_owner)s, %(attempt)s, %(lease_seconds)s,
        %(status)s, %(headers)s, %(body)s, %(schema_version)s,
        %(last_error)s, %(recovery_point)s, %(reconcile_in)s, %(effects)s
    ) AS w (
        scope, key, from_state, owner, lease_over_by, past_expiry,
        to_state, new_owner, attempt, lease_seconds,
        status, headers, body, schema_version,
        last_error, recovery_point, reconcile_in, effects
    )
),

{held}

UPDATE idempotency_keys AS k SET
    state = w.to_state,
    owner = coalesce(w.new_owner, k.owner),
    attempt = coalesce(w.attempt, k.attempt),
    effects = coalesce(w.effects, k.effects),
    lease_until = coalesce(now() + w.lease_seconds * interval '1 second', k.lease_until),
    recovery_point = coalesce(w.recovery_point, k.recovery_point),
    response_status = w.status,
    response_headers = w.headers,
    response_body = w.body,
    response_schema_version = w.schema_version,
    last_error = w.last_error,
    reconcile_at = now() + w.reconcile_in * interval '1 second',
    finished_at = CASE WHEN w.to_state IN ('completed', 'failed') THEN now() END,
    expires_at = CASE
        WHEN w.to_state IN ('completed', 'failed')
            THEN greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
        ELSE k.expires_at
    END
FROM held AS w
WHERE k.ctid = w.place
RETURNING {columns}
