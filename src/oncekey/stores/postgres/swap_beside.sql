-- The same as swap.sql, and in the same commit a step, an audit line, and the reconciler's tries.
-- All of these come from `moved`, not from `held`: a row that changed between the snapshot and the lock is held, but
-- not moved.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(to_state)s, %(new_owner)s, %(attempt)s, %(lease_seconds)s,
        %(status)s, %(headers)s, %(body)s, %(schema_version)s,
        %(last_error)s, %(recovery_point)s, %(reconcile_in)s, %(effects)s, %(from_effects)s,
        %(reconcile_tries)s, %(event)s, %(who)s, %(why)s,
        %(step_name)s, %(step_kind)s, %(step_state)s, %(step_repeatable)s, %(step_result)s,
        %(step_downstream_key)s, %(step_provider_id)s
    ) AS w (
        scope, key, from_state, owner, lease_over_by, past_expiry,
        to_state, new_owner, attempt, lease_seconds,
        status, headers, body, schema_version,
        last_error, recovery_point, reconcile_in, effects, from_effects,
        reconcile_tries, event, who, why,
        step_name, step_kind, step_state, step_repeatable, step_result,
        step_downstream_key, step_provider_id
    )
),

{held},

moved AS (
    UPDATE idempotency_keys AS k SET
        reconcile_tries = coalesce(w.reconcile_tries, k.reconcile_tries),
        {set}
    FROM held AS w
    WHERE
        k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
        AND (w.from_effects IS NULL OR k.effects = w.from_effects)
    RETURNING
        k.*, w.to_state = 'expired' AS forgets, w.event, w.from_state AS before, w.to_state AS after, w.who, w.why,
        w.step_name, w.step_kind, w.step_state, w.step_repeatable, w.step_result,
        w.step_downstream_key, w.step_provider_id
),

stepped AS (
    INSERT INTO idempotency_steps AS s (
        scope, key, name, kind, state, repeatable, result, downstream_key, provider_id
    )
    SELECT
        m.scope, m.key, m.step_name, m.step_kind, m.step_state, m.step_repeatable, m.step_result,
        m.step_downstream_key, m.step_provider_id
    FROM moved AS m
    WHERE m.step_name IS NOT NULL
    -- The kind never changes, and a NULL does not overwrite the provider's id.
    ON CONFLICT (scope, key, name) DO UPDATE SET
        state = excluded.state,
        repeatable = excluded.repeatable,
        result = excluded.result,
        downstream_key = excluded.downstream_key,
        provider_id = coalesce(excluded.provider_id, s.provider_id)
),

{forgotten},

{noted}

SELECT {columns} FROM moved AS k
