-- Move each row that still is (from_state, owner); a row that is not returned was not moved. Requests wait for this
-- statement, so a move that also writes a step or an audit line uses swap_beside.sql.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(to_state)s, %(new_owner)s, %(attempt)s, %(lease_seconds)s,
        %(status)s, %(headers)s, %(body)s, %(schema_version)s,
        %(last_error)s, %(recovery_point)s, %(reconcile_in)s, %(effects)s, %(from_effects)s
    ) AS w (
        scope, key, from_state, owner, lease_over_by, past_expiry,
        to_state, new_owner, attempt, lease_seconds,
        status, headers, body, schema_version,
        last_error, recovery_point, reconcile_in, effects, from_effects
    )
),

{held}

UPDATE idempotency_keys AS k SET
    {set}
FROM held AS w
WHERE
    k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
    AND (w.from_effects IS NULL OR k.effects = w.from_effects)
RETURNING {columns}
